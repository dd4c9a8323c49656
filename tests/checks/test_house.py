"""The checks of size and language themselves."""

from pathlib import Path

import pytest

from tests.checks import prose
from tests.checks.house import exceeded, lowered, small_files


def test_only_numbers_above_their_budget_are_reported() -> None:
    actual = {"house": {"files": 10, "lines": 99}, "prose": {"fleet": 1}}
    assert exceeded(actual, {"house": {"files": 10, "lines": 100}, "prose": {"fleet": 1}}) == []
    assert exceeded(actual, {"house": {"files": 9, "lines": 100}}) == [
        "house.files: 10, and the budget is 9",
        "prose.fleet: 1, and the budget is 0",
    ]


def test_a_budget_is_only_lowered_and_keeps_its_reasons() -> None:
    text = "[house]\nfiles = 10  # reason\nlines = 5\n\n[seconds]\nfiles = 7\n"
    assert lowered(text, {"house": {"files": 8, "lines": 9}}) == text.replace("files = 10", "files = 8")


def test_a_small_module_with_one_importer_is_counted() -> None:
    assert small_files({
        "fleet/__init__.py": "",
        "fleet/one.py": "X = 1\n",
        "fleet/two.py": "from fleet import one\n",
        "fleet/three.py": "from fleet.two import one\nimport fleet.long\n",
        "fleet/four.py": "from fleet.two import one\n",
        "fleet/long.py": "X = 1\n" * 70,
    }) == ["fleet/one.py"]  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "pattern"),
    [
        ("What the agent reports is stored.", "clause as subject"),
        ("Requests of others fail.", "of others, of its own"),
        ("It has a thread of its own.", "of others, of its own"),
        ("Somebody may stop it.", "somebody, nobody"),
        ("The loop goes on.", "private verb"),
        ("It is mended.", "private verb"),
        ("The page shows it, too.", "filler"),
        ("It returns at once.", "filler"),
        ("None: that was the end.", "riddle"),
        ("Agents send a report every 2 s. The control plane stores the newest one.", None),
        ("What is a cell?", None),
        ("Which cells are full?", None),
    ],
)
def test_sentences_are_found_in_docs_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str, pattern: str | None
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"# Page\n\n{sentence} `What code has is left.`\n\n    Nobody reads code.\n")
    (tmp_path / "module.py").write_text(f'"""{sentence}"""\nX = "somebody"\n')
    expected = {pattern} if pattern else set()
    assert {finding.pattern for finding in prose.findings("page.md")} == expected
    assert {finding.pattern for finding in prose.findings("module.py")} == expected
