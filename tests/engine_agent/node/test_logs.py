"""Logs are quoted from their end and kept short while they are written."""

from pathlib import Path

from engine_agent.node.logs import MAX_LINE_CHARS, TAIL_BYTES, bound, last_lines, set_aside


def test_the_last_lines_that_say_something(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("one\n\n  two \nthree\n\n")
    assert last_lines(log, 2) == ["two", "three"]
    assert last_lines(tmp_path / "none.log") == []


def test_long_lines_and_broken_text_are_cut_and_kept_readable(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"x" * (2 * TAIL_BYTES) + b"\n\xff end\n")
    first, last = last_lines(log)
    assert (len(first), last) == (MAX_LINE_CHARS, "\N{REPLACEMENT CHARACTER} end")


def test_a_long_log_becomes_the_earlier_one_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"before\n")
        assert not bound(log, max_bytes=7)
        assert bound(log, max_bytes=6)
        writer.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert (tmp_path / "engine.log.1").read_bytes() == b"before\n"


def test_every_process_begins_a_log_of_its_own_and_the_last_one_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    set_aside(log)
    for text in ("first", "second"):
        log.write_text(text)
        set_aside(log)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("engine.log.1", "second")]


def test_a_log_that_is_not_there_is_short_enough(tmp_path: Path) -> None:
    assert not bound(tmp_path / "engine.log")
