"""A cloud machine is gone only with proof."""

from dataclasses import replace
from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from fleet.machines.planner import ENDED, VISIBLE_AFTER, KnownMachine, Listed, ListedState, plan_listed_states
from tests.fleet.fleets import NOW

MACHINE = KnownMachine("i-1", "us-east-1a", "running", NOW - VISIBLE_AFTER)


def after(machine: KnownMachine, **said: object) -> ListedState | None:
    columns: dict[str, object] = {"states": {}, "began_at": NOW, "complete": True}
    found = plan_listed_states([machine], Listed(**{**columns, **said}))  # type: ignore[arg-type]
    return found[0] if found else None


def test_what_is_listed_is_as_the_list_says() -> None:
    assert after(MACHINE, states={"i-1": "shutting-down"}) == ListedState("i-1", "shutting-down", 0)
    assert after(replace(MACHINE, absent_lists=1), states={"i-1": "running"}) == ListedState("i-1", "running", 0)


def test_two_whole_lists_without_it_prove_that_a_machine_is_gone() -> None:
    assert after(MACHINE) == ListedState("i-1", "running", 1)
    assert after(replace(MACHINE, absent_lists=1)) == ListedState("i-1", "gone", 2)


def test_nothing_follows_from_half_a_list_a_silent_zone_or_a_young_machine() -> None:
    almost = replace(MACHINE, absent_lists=1)
    assert after(almost, complete=False) is None
    assert after(almost, silent_zones={"us-east-1a"}) is None
    assert after(replace(almost, launched_at=NOW - VISIBLE_AFTER + timedelta(seconds=1))) is None


def test_what_ended_does_not_come_back_by_a_late_list() -> None:
    assert after(replace(MACHINE, state="terminated"), states={"i-1": "running"}) is None


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 4000)), max_size=8))
def test_no_sequence_of_lists_that_are_not_whole_proves_anything(lists: list[tuple[bool, bool, int]]) -> None:
    machine = MACHINE
    proofs = 0
    for complete, is_silent, later_s in lists:
        began_at: datetime = NOW + timedelta(seconds=later_s)
        silent = {"us-east-1a"} if is_silent else set()
        proofs += complete and not is_silent
        found = after(machine, complete=complete, silent_zones=silent, began_at=began_at)
        if found is not None:
            machine = replace(machine, state=found.state, absent_lists=found.absent_lists)
    assert (machine.state in ENDED) == (proofs >= 2)
