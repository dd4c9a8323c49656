"""Machines of nobody: ended once two looks agree, few at a time, and none while records may be lost."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.orphans import ENDED_AT_ONCE, plan_orphans

NAMES = st.sets(st.sampled_from([f"n-{number}" for number in range(12)]))


def test_one_look_is_not_enough() -> None:
    first = plan_orphans(["n-1", "n-2"], {"n-1": True, "n-2": False}, ())
    assert (first.end, first.suspects) == ((), frozenset({"n-2"}))
    assert plan_orphans(["n-1", "n-2"], {"n-1": True, "n-2": False}, first.suspects).end == ("n-2",)


def test_what_is_of_no_record_is_ended_too_but_not_when_much_is() -> None:
    assert plan_orphans(["n-1", "n-9"], {"n-1": True}, {"n-9"}).end == ("n-9",)
    lost = plan_orphans(["n-1", "n-7", "n-8", "n-9"], {"n-1": True}, {"n-7", "n-8", "n-9"})
    assert lost.end == ()
    assert lost.held == "3 of 4 machines are of no node that is recorded: were records lost?"


@given(NAMES, NAMES, NAMES, NAMES)
def test_what_may_run_is_never_ended(running: set[str], wanted: set[str], ended: set[str], before: set[str]) -> None:
    known = {**dict.fromkeys(ended, False), **dict.fromkeys(wanted, True)}
    plan = plan_orphans(running, known, before)
    assert not set(plan.end) & wanted
    assert set(plan.end) <= running & before
    assert len(plan.end) <= ENDED_AT_ONCE
