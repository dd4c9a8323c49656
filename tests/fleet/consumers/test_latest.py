"""Latest rows: nothing newer is ever overwritten, and nothing is lost between two writes."""

from dataclasses import dataclass, replace

import pytest

from fleet.consumers.latest import LatestRows


@dataclass(frozen=True)
class Said:
    connection: str
    word: str


def last_words(row: Said) -> Said:
    return replace(row, word="gone")


@pytest.fixture
def rows() -> LatestRows[Said]:
    return LatestRows()


def test_the_latest_row_is_taken_once(rows: LatestRows[Said]) -> None:
    rows.note("a", Said("k", "1"))
    rows.note("a", Said("k", "2"))
    assert rows.take() == {"a": Said("k", "2")}
    assert rows.take() == {}


def test_noting_returns_what_was_said_before(rows: LatestRows[Said]) -> None:
    assert rows.note("a", Said("k", "1")) is None
    rows.take()
    assert rows.note("a", Said("k", "2")) == Said("k", "1")


def test_what_could_not_be_written_comes_again_unless_there_is_newer(rows: LatestRows[Said]) -> None:
    rows.note("a", Said("k", "1")), rows.note("b", Said("k", "1"))

    def broken(_: list[Said]) -> None:
        rows.note("a", Said("k", "2"))
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - it has no text
        rows.write(broken)
    assert rows.take() == {"a": Said("k", "2"), "b": Said("k", "1")}


def test_what_was_written_does_not_come_again(rows: LatestRows[Said]) -> None:
    rows.note("a", Said("k", "1"))
    written: list[Said] = []

    rows.write(written.extend)
    rows.write(written.extend)
    assert written == [Said("k", "1")]


def test_a_connection_that_ends_has_a_last_word(rows: LatestRows[Said]) -> None:
    rows.note("a", Said("k", "1"))
    rows.end("a", "k", last_words)
    rows.end("a", "k", last_words)
    assert rows.take() == {"a": Said("k", "gone")}
    assert rows.note("a", Said("k2", "1")) is None


def test_the_end_of_an_older_connection_takes_no_word_from_the_newer(rows: LatestRows[Said]) -> None:
    rows.note("a", Said("new", "1"))
    rows.end("a", "old", last_words)
    assert rows.take() == {"a": Said("new", "1")}


def test_a_connection_that_never_spoke_has_no_last_word(rows: LatestRows[Said]) -> None:
    rows.end("a", "k", last_words)
    assert rows.take() == {}
