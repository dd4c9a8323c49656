from pathlib import Path

from controlplane.embedded.console import RotatingLog


def test_lines_are_appended_over_restarts(tmp_path: Path) -> None:
    for line in ("first", "second"):
        log = RotatingLog(tmp_path / "web.log")
        log.write([line])
        log.close()
    assert (tmp_path / "web.log").read_text() == "first\nsecond\n"


def test_a_full_file_moves_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "web.log", rotate_at_bytes=10, kept_files=3)
    for number in range(5):
        log.write([f"line {number}!"])
    log.close()
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"web.log": "line 4!\n", "web.log.1": "line 3!\n", "web.log.2": "line 2!\n"}


def test_a_log_that_could_not_be_opened_again_costs_lines_and_never_its_service(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = RotatingLog(folder / "web.log", rotate_at_bytes=10)
    log.write(["line 0!"])
    folder.rename(tmp_path / "gone")
    for number in (1, 2):
        log.write([f"line {number}!"])
    (tmp_path / "gone").rename(folder)
    log.write(["line 3!"])
    log.close()
    log.close()
    assert (folder / "web.log").read_text() == "line 3!\n"
