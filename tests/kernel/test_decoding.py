"""JSON of callers: one meaning, and texts that a column takes."""

import ast
from pathlib import Path

import pytest

from kernel.decoding import UnstorableText, decode_json

ROOT = Path(__file__).resolve().parents[2]
READ_OUR_OWN = {
    "controlplane/management/commands/seed_demo.py",
    "fleet/clouds/aws/launch.py",
    "fleet/clouds/aws/region.py",
    "fleet/clouds/services/upkeep.py",
    "kernel/decoding.py",
    "models_registry/management/commands/medusa_tree.py",
}
"""Modules that read the project's own files or answers of a cloud."""


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ('"\\u0000"', ("",)),
        ('{"a": {"b": ["x", "\\ud800"]}}', ("a.b.1",)),
        ('{"a\\u0000": 1, "c": "\\udfff"}', ("", "c")),
        ('{"a": ["\\u0000", "\\u0000"]}', ("a.0", "a.1")),
    ],
)
def test_a_text_that_no_column_takes_is_named_by_its_place(text: str, places: tuple[str, ...]) -> None:
    for given in (text, text.encode()):
        with pytest.raises(UnstorableText, match="NUL or half of a surrogate") as refused:
            decode_json(given)
        assert refused.value.places == places


def test_every_other_character_is_text() -> None:
    assert decode_json('["\\ud83d\\ude00", "\\u0001", "\\u202e", "\\\\u0000"]') == [
        "\U0001f600", "\x01", "\u202e", "\\u0000",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_control_plane_decodes_what_callers_send_in_one_place() -> None:
    apps = ("accounts", "audit", "controlplane", "fleet", "kernel", "models_registry", "traffic")
    found = {
        str(path.relative_to(ROOT))
        for app in apps
        for path in (ROOT / app).rglob("*.py")
        if "strict_json" in (text := path.read_text())  # most files are not worth parsing
        and any(
            isinstance(node, ast.ImportFrom) and node.module == "engine_agent.protocol.strict_json"
            for node in ast.walk(ast.parse(text))
        )
    }
    assert found == READ_OUR_OWN
