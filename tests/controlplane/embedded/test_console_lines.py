import pytest

from controlplane.embedded.console import LONGEST_LINE_CHARS, LineSplitter, prefixed


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\ntw", b"o"], ["one", "two"]),
        ([b"windows\r\n"], ["windows"]),
        ([b"\n\n"], ["", ""]),
        ([b"caf\xc3", b"\xa9\n"], ["café"]),
        ([b"\xff\n"], ["\ufffd"]),
        ([], []),
    ],
)
def test_lines_are_whole_however_the_chunks_fall(chunks: list[bytes], lines: list[str]) -> None:
    splitter = LineSplitter()
    found = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert found + splitter.finish() == lines


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    splitter = LineSplitter()
    pieces = splitter.feed(b"x" * (LONGEST_LINE_CHARS * 2 + 1))
    assert [len(piece) for piece in pieces] == [LONGEST_LINE_CHARS, LONGEST_LINE_CHARS, 1]
    assert splitter.finish() == []


@pytest.mark.parametrize(
    ("name", "line", "shown"),
    [("web", "hello", "web      | hello"), ("postgres", "LOG: x", "postgres | LOG: x"), ("jobs", "", "jobs     |")],
)
def test_prefixes_align(name: str, line: str, shown: str) -> None:
    assert prefixed(name, line, width=8, colour=False) == shown


def test_a_name_keeps_its_colour_and_the_line_keeps_its_own() -> None:
    first, second = (prefixed("worker", line, width=8, colour=True) for line in ("a", "b"))
    assert first.startswith("\x1b[")
    assert first.removesuffix("a") == second.removesuffix("b")
