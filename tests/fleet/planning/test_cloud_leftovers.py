"""What belongs to no machine is ended at the second look, once it is old, few at once, and not while there is much."""

from collections.abc import Mapping
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.cloud_leftovers import Leftover, LeftoverKind, LeftoverPlan, plan_leftovers
from fleet.planning.cloud_sweep import SETTINGS
from tests.fleet.planning.fleets import NOW

OLD = NOW - timedelta(seconds=SETTINGS.orphan_after_s)
SEEN = {"vol-1": OLD}


def volume(name: str = "vol-1", unit: str = "u-1", created_at: datetime | None = OLD) -> Leftover:
    return Leftover(LeftoverKind.VOLUME, name, unit, created_at)


def interface(name: str = "eni-1") -> Leftover:
    return Leftover(LeftoverKind.INTERFACE, name, "u-1", None)


def plan(*found: Leftover, before: Mapping[str, datetime] = SEEN, machines: int = 10) -> LeftoverPlan:
    return plan_leftovers(found, {"u-open"}, before, NOW, machines=machines)


def test_the_first_look_ends_nothing_and_the_second_what_is_old() -> None:
    assert plan(volume(), before={}) == LeftoverPlan((), {"vol-1": NOW})
    assert plan(volume()) == LeftoverPlan((volume(),), SEEN)
    assert not plan(volume(created_at=OLD + timedelta(seconds=1))).end


@pytest.mark.parametrize(("seen_s", "is_ended"), [(599.0, False), (600.0, True)])
def test_what_has_no_date_is_as_old_as_its_first_look(seen_s: float, is_ended: bool) -> None:
    seen = {"eni-1": NOW - timedelta(seconds=seen_s)}
    assert plan(interface(), before=seen) == LeftoverPlan((interface(),) if is_ended else (), seen)


def test_what_a_launch_may_still_note_is_no_suspect() -> None:
    assert plan(volume(unit="u-open")) == LeftoverPlan((), {})


def test_five_of_a_kind_are_ended_at_once() -> None:
    many = [volume(f"vol-{number}") for number in range(7)]
    seen = {one.provider_id: OLD for one in many} | {"eni-1": OLD}
    ended = plan(*many, interface(), before=seen, machines=40).end
    assert [one.provider_id for one in ended] == [*(f"vol-{number}" for number in range(5)), "eni-1"]


def test_when_many_of_a_kind_lie_about_that_kind_is_held() -> None:
    many = [volume(f"vol-{number}") for number in range(6)]
    seen = {one.provider_id: OLD for one in many} | {"eni-1": OLD}
    held = plan(*many, interface(), before=seen)
    assert held.held == "6 of kind volume belong to no machine, beside 10 machines: did somebody take them off?"
    assert held.end == (interface(),)


def test_without_any_record_all_is_held() -> None:
    held = plan_leftovers([volume()], (), SEEN, NOW, machines=0, has_records=False)
    assert (held.end, held.held) == ((), "1 of kind volume belong to no machine, and no launch is recorded at all")


KINDS = st.builds(
    Leftover,
    st.sampled_from(LeftoverKind),
    st.sampled_from([f"x-{number}" for number in range(12)]),
    st.sampled_from(["u-1", "u-open", ""]),
    st.sampled_from([None, OLD, NOW]),
)


@given(st.lists(KINDS, unique_by=lambda one: one.provider_id), st.sets(st.sampled_from([f"x-{n}" for n in range(12)])))
def test_only_what_two_looks_showed_is_ended_and_never_what_a_launch_may_note(
    found: list[Leftover], seen: set[str]
) -> None:
    made = plan(*found, before=dict.fromkeys(seen, OLD))
    assert {one.provider_id for one in made.end} <= seen & set(made.suspects)
    assert all(one.unit != "u-open" for one in made.end)
    assert set(made.suspects) <= {one.provider_id for one in found}
