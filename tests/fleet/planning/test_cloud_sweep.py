"""Which machines of a cloud are ended as nobody's: two looks, old enough, unknown by id and by unit, and never many."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.cloud_sweep import SETTINGS, ListedMachine, SweepPlan, plan_sweep
from tests.fleet.planning.fleets import NOW

OLD = NOW - timedelta(seconds=SETTINGS.orphan_after_s)


def one(name: str, unit: str = "u-1", state: str = "running", launched_at: object = OLD) -> ListedMachine:
    return ListedMachine(name, unit, state, launched_at)  # type: ignore[arg-type]


def test_a_machine_of_nobodys_is_ended_at_the_second_look_and_once_it_is_old() -> None:
    listed = [one("i-1")]
    assert plan_sweep(listed, (), (), (), NOW) == SweepPlan(suspects=frozenset({"i-1"}))
    assert plan_sweep(listed, (), (), {"i-1"}, NOW).end == ("i-1",)
    assert not plan_sweep(listed, (), (), {"i-1"}, NOW - timedelta(seconds=1)).end


def test_what_is_known_or_may_still_be_noted_or_has_ended_is_left_alone() -> None:
    listed = [one("i-1"), one("i-2", unit="u-open"), one("i-3", state="terminated")]
    assert plan_sweep(listed, {"i-1"}, {"u-open"}, {"i-1", "i-2", "i-3"}, NOW) == SweepPlan()


def test_when_many_are_unknown_the_records_are_what_is_wrong() -> None:
    listed = [one(f"i-{number}") for number in range(6)]
    plan = plan_sweep(listed, (), (), {each.provider_id for each in listed}, NOW)
    assert plan.held == "6 of 6 machines are of no launch that is recorded: were records lost?"
    assert not plan.end
    known = [one(f"k-{number}") for number in range(30)]
    names = {each.provider_id for each in known}
    assert len(plan_sweep([*listed, *known], names, (), {"i-0", "i-5"}, NOW).end) == 2


machines = st.lists(
    st.builds(
        ListedMachine,
        st.integers(0, 40).map(lambda number: f"i-{number}"),
        st.sampled_from(["u-1", "u-2", ""]),
        st.sampled_from(["pending", "running", "shutting-down", "terminated"]),
        st.integers(0, 2000).map(lambda seconds: NOW - timedelta(seconds=seconds)),
    ),
    unique_by=lambda machine: machine.provider_id,
)
names = st.frozensets(st.integers(0, 40).map(lambda number: f"i-{number}"))


@given(listed=machines, known=names, before=names, units=st.frozensets(st.sampled_from(["u-1", "u-2"])))
def test_only_suspects_that_nobody_knows_are_ended_and_an_empty_database_ends_nobody(
    listed: list[ListedMachine], known: frozenset[str], before: frozenset[str], units: frozenset[str]
) -> None:
    plan = plan_sweep(listed, known, units, before, NOW)
    by_id = {machine.provider_id: machine for machine in listed}
    assert set(plan.end) <= before - known
    assert set(plan.end) <= plan.suspects
    assert not {by_id[name].unit for name in plan.end} & units
    assert len(plan.end) <= SETTINGS.ended_at_once
    assert not plan_sweep(listed, (), (), before, NOW, has_records=False).end
