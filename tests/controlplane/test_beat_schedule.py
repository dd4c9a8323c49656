"""Beat starts whatever became of its schedule file."""

from pathlib import Path

import pytest

from controlplane.celery import MendingScheduler, app


def started(folder: Path) -> set[str]:
    """The names that a beat with a file in this folder asks for."""
    scheduler = MendingScheduler(app, schedule_filename=str(folder / "beat-schedule"))
    names = set(scheduler.schedule)
    scheduler.close()
    return names


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_schedule_file_that_was_cut_off_is_replaced(tmp_path: Path, kept: float) -> None:
    wanted = started(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.suffix not in {".dir", ".bak"}]
    assert files
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept)])
    assert started(tmp_path) == wanted
