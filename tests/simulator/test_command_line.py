"""`python -m simulator` prints what it checked, repeats failures, and draws."""

from pathlib import Path

import pytest

from simulator.__main__ import main


def test_a_run_prints_its_invariants_and_draws_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "figures" / "run.html"

    assert main(["bad_version_never_starts", "--first-seed", "3", "--figure", str(page), "-v"]) == 0

    output = capsys.readouterr().out
    assert "timeline of seed 3" in output
    assert "rollout.rolled_back" in output
    assert "I10  a disruption is charged in the write that causes it" in output
    assert "1 seed in" in output
    assert "llama in east" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["nothing"], ["all_silent", "--seeds", "0"]])
def test_a_wrong_question_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "must be at least 1" in (output := capsys.readouterr().err) or "there is no scenario" in output
