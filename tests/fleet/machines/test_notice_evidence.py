"""Notices with statements of several sources: when they are valid, and when they are over."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from fleet.machines.planner import LATEST, Evidence, Statement, add_statement, bounded_end, earliest_end, is_in_force
from fleet.reconcile.planning.states import NoticeSource
from tests.fleet.rows import NOW

EVENTS, STATUS, IMDS = NoticeSource.EVENTS, NoticeSource.STATUS, NoticeSource.IMDS


def word(key: str, minute: int = 0, ends_minute: int | None = None, *, over: bool = False) -> Statement:
    ends_at = NOW + timedelta(minutes=ends_minute) if ends_minute is not None else None
    return Statement(key, NOW + timedelta(minutes=minute), ends_at, over)


def after(*words: tuple[NoticeSource, Statement]) -> Evidence:
    evidence: Evidence = {}
    for source, said in words:
        evidence = add_statement(evidence, source, said) or evidence
    return evidence


def test_the_earliest_end_counts_whoever_named_it_and_in_whatever_order() -> None:
    words = [(EVENTS, word("a", 0, 2)), (IMDS, word("b", 1, 1))]
    assert earliest_end(after(*words)) == earliest_end(after(*reversed(words))) == NOW + timedelta(minutes=1)


def test_a_list_goes_before_what_was_announced_once_and_ends_it() -> None:
    moved = after((EVENTS, word("a", 0, 60)), (STATUS, word("s", 1, 90)))
    assert earliest_end(moved) == NOW + timedelta(minutes=90)
    assert not is_in_force(add_statement(moved, STATUS, word("", 2, over=True)) or moved)


def test_what_a_machine_takes_back_ends_only_what_it_said_itself() -> None:
    both = after((EVENTS, word("a", 0, 2)), (IMDS, word("b", 0, 1)), (IMDS, word("", 1, over=True)))
    assert is_in_force(both)
    assert earliest_end(both) == NOW + timedelta(minutes=2)
    assert not is_in_force(after((IMDS, word("b")), (IMDS, word("", 1, over=True))))


def test_twice_late_or_never_begun_is_nothing_new() -> None:
    known = after((EVENTS, word("b", 5, 7)))
    assert add_statement(known, EVENTS, word("b", 5, 7)) is None
    assert add_statement(known, EVENTS, word("a", 4, 6)) is None
    assert add_statement({}, IMDS, word("", over=True)) is None
    ended = after((EVENTS, word("b", 5, 7)), (EVENTS, word("", 6, over=True)))
    assert add_statement(ended, EVENTS, word("b", 5, 7)) is None
    assert add_statement(ended, EVENTS, word("c", 7, 9)) is not None


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_one_sources_words_decides_nothing(minutes: list[int], random: object) -> None:
    words = [(EVENTS, word(str(minute), minute, minute + 2)) for minute in minutes]
    shuffled = list(words)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert after(*shuffled) == after(*words)


@given(st.floats(allow_nan=False))
def test_an_end_that_a_machine_names_is_bounded(seconds: float) -> None:
    end = bounded_end(seconds, NOW)
    assert end is not None
    assert NOW <= end <= NOW + LATEST


def test_an_end_that_a_machine_names_is_that_of_the_queue_to_the_microsecond() -> None:
    """Another end would be a second event."""
    at = NOW + timedelta(seconds=3.515618)
    assert bounded_end((NOW + timedelta(seconds=120)).timestamp(), at) == NOW + timedelta(seconds=120)
