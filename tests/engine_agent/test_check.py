"""A release that cannot read the journals of a host is rejected before the switch."""

from pathlib import Path

import pytest

from engine_agent import check


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("machine/journal.json", "{}"),
        ("runs/n-1/journal.json", "{}"),
        ("runs/i-1/journal.json", '{"type": "other"}'),
        ("runs/i-1/applications.json", '{"type": "application_tls", "version": 7}'),
    ],
)
def test_what_it_cannot_read_is_named(
    file: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.run(["--code", str(tmp_path)]) == 0
    path = tmp_path / "state" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert check.run(["--code", str(tmp_path)]) == 1
    assert f"it cannot read {path}: " in capsys.readouterr().err
