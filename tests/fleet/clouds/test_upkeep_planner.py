"""Figures for the external alarm fit into one call. Only the writer of the object owns the clouds. Garbage is deleted
after two lists and a grace period, a few per list, and never while records may be lost."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import botocore.session
import pytest
from botocore.validate import ParamValidator
from hypothesis import given
from hypothesis import strategies as st

from fleet.clouds.planning.upkeep import (
    CLOUD_RESOURCES,
    FILES,
    PASS_COUNTS_S,
    PROVIDER_MACHINES,
    STALE_AFTER,
    GarbagePlan,
    GarbagePolicy,
    InstallFigures,
    Resource,
    ResourceKind,
    Verdict,
    beat_verdict,
    metrics_request,
    plan_garbage_collection,
    stale_reason,
)
from tests.fleet.fleets import NOW

STANDING = InstallFigures(cells_wanted=4, cells_ready=3, incidents_open=1, reconciled_s=0.8, last_pass_s=2.5)


def values(figures: InstallFigures) -> dict[str, float]:
    return {one["MetricName"]: one["Value"] for one in metrics_request("sw-0123456789ab", figures)["MetricData"]}


def test_all_figures_are_one_request_that_cloudwatch_takes() -> None:
    shape = botocore.session.get_session().get_service_model("cloudwatch").operation_model("PutMetricData").input_shape
    assert not ParamValidator().validate(metrics_request("sw-0123456789ab", STANDING), shape).has_errors()
    assert values(STANDING) == {
        "CompletedPasses": 1.0, "CellsWanted": 4.0, "CellsReady": 3.0, "OpenIncidents": 1.0, "LastPassAge": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize(("age_s", "passes"), [(None, 0.0), (0.0, 1.0), (PASS_COUNTS_S, 1.0), (60.1, 0.0)])
def test_a_pass_counts_for_as_long_as_the_alarms_period(age_s: float | None, passes: float) -> None:
    figures = InstallFigures(0, 0, 0, reconciled_s=age_s, last_pass_s=age_s)
    assert values(figures)["CompletedPasses"] == passes
    assert ("LastPassAge" in values(figures)) is (age_s is not None)


@pytest.mark.parametrize(
    ("was_written", "there", "verdict"),
    [
        (True, None, Verdict.OWNER),
        (None, None, Verdict.AGAIN),
        (False, None, Verdict.AGAIN),
        (False, "mine", Verdict.OWNER),
        (False, "another's", Verdict.LOST),
    ],
)
def test_a_beat_is_judged_by_what_is_there(was_written: bool | None, there: str | None, verdict: Verdict) -> None:
    assert beat_verdict(was_written=was_written, nonce_there=there, nonce_tried="mine") is verdict


def test_without_a_beat_for_long_nothing_may_be_changed() -> None:
    assert stale_reason(None, NOW) == ""
    assert stale_reason(NOW - STALE_AFTER, NOW) == ""
    assert "was last written at" in stale_reason(NOW - STALE_AFTER - timedelta(seconds=1), NOW)


OLD = NOW - timedelta(seconds=CLOUD_RESOURCES.grace_period_s)
POLICIES = (PROVIDER_MACHINES, CLOUD_RESOURCES, FILES)


def volume(name: str = "vol-1", created_at: datetime | None = OLD) -> Resource:
    return Resource(ResourceKind.VOLUME, name, is_referenced=False, created_at=created_at)


def interface(name: str = "eni-1") -> Resource:
    return Resource(ResourceKind.INTERFACE, name, is_referenced=False)


def machine(name: str, *, is_referenced: bool = False, is_recorded: bool = False) -> Resource:
    return Resource(ResourceKind.MACHINE, name, is_referenced, is_recorded=is_recorded)


def plan(
    *found: Resource,
    before: Mapping[str, datetime] | Sequence[str] = ("vol-1", "eni-1"),
    policy: GarbagePolicy = CLOUD_RESOURCES,
    machines: int = 10,
) -> GarbagePlan:
    seen = before if isinstance(before, Mapping) else dict.fromkeys(before, OLD)
    return plan_garbage_collection(found, seen, NOW, policy, machines=machines)


def ids(made: GarbagePlan) -> list[str]:
    return [one.id for one in made.delete]


def test_the_first_list_deletes_nothing_and_the_second_what_is_old() -> None:
    assert plan(volume(), before={}) == GarbagePlan((), {"vol-1": NOW})
    assert plan(volume()) == GarbagePlan((volume(),), {"vol-1": OLD})
    assert not plan(volume(created_at=OLD + timedelta(seconds=1))).delete


@pytest.mark.parametrize(("seen_s", "is_deleted"), [(599.0, False), (600.0, True)])
def test_without_a_date_the_age_counts_from_the_first_list(seen_s: float, is_deleted: bool) -> None:
    seen = {"eni-1": NOW - timedelta(seconds=seen_s)}
    assert plan(interface(), before=seen) == GarbagePlan((interface(),) if is_deleted else (), seen)


def test_machines_of_a_provider_need_two_lists_and_no_further_grace_period() -> None:
    found = [machine("n-1", is_referenced=True), machine("n-2", is_recorded=True)]
    first = plan(*found, before={}, policy=PROVIDER_MACHINES)
    assert (first.delete, first.suspects) == ((), {"n-2": NOW})
    assert ids(plan(*found, before=first.suspects, policy=PROVIDER_MACHINES)) == ["n-2"]


def test_files_need_one_list_and_a_day() -> None:
    day = timedelta(days=1)
    old, young = (Resource(ResourceKind.FILE, str(at), False, created_at=at) for at in (NOW - day, NOW))
    assert plan(old, young, before={}, policy=FILES).delete == (old,)


def test_a_referenced_resource_is_no_suspect() -> None:
    known = Resource(ResourceKind.VOLUME, "vol-1", is_referenced=True, created_at=OLD)
    assert plan(known) == GarbagePlan((), {})


def test_five_of_a_kind_are_deleted_at_once() -> None:
    many = [volume(f"vol-{number}") for number in range(7)]
    made = plan(*many, interface(), before=[one.id for one in (*many, interface())], machines=40)
    assert ids(made) == [*(f"vol-{number}" for number in range(5)), "eni-1"]


def test_a_kind_with_many_unknown_resources_is_held_alone() -> None:
    many = [volume(f"vol-{number}") for number in range(6)]
    made = plan(*many, interface(), before=[one.id for one in (*many, interface())])
    assert made.held == "volume: 6 have no record, compared with 10 machines; were records lost?"
    assert made.delete == (interface(),)


@pytest.mark.parametrize(
    ("unknown", "machines", "is_held"), [(2, 2, False), (3, 4, True), (3, 12, False), (4, 12, True)]
)
def test_a_quarter_of_a_providers_machines_may_be_unknown(unknown: int, machines: int, is_held: bool) -> None:
    found = [machine(f"n-{number}") for number in range(unknown)]
    made = plan(*found, before=[one.id for one in found], policy=PROVIDER_MACHINES, machines=machines)
    assert (bool(made.held), bool(made.delete)) == (is_held, not is_held)


def test_recorded_machines_that_ended_hold_nothing() -> None:
    found = [machine(f"n-{number}", is_recorded=True) for number in range(9)]
    made = plan(*found, before=[one.id for one in found], policy=PROVIDER_MACHINES, machines=9)
    assert (made.held, len(made.delete)) == ("", 5)


def test_without_any_launch_on_record_everything_is_held() -> None:
    made = plan_garbage_collection([volume()], {"vol-1": OLD}, NOW, CLOUD_RESOURCES, machines=9, has_records=False)
    assert (made.delete, made.held) == ((), "volume: 1 have no record, and no launch is recorded at all")


NAMES = [f"x-{number}" for number in range(12)]
RESOURCES = st.builds(
    Resource,
    st.sampled_from(ResourceKind),
    st.sampled_from(NAMES),
    st.booleans(),
    is_recorded=st.booleans(),
    created_at=st.sampled_from([None, OLD, NOW, NOW - timedelta(days=2)]),
)


@given(
    st.lists(RESOURCES, unique_by=lambda one: one.id),
    st.sets(st.sampled_from(NAMES)),
    st.sampled_from(POLICIES),
    st.integers(0, 40),
)
def test_only_old_suspects_are_deleted_and_never_a_referenced_resource(
    found: list[Resource], seen: set[str], policy: GarbagePolicy, machines: int
) -> None:
    made = plan(*found, before=sorted(seen), policy=policy, machines=machines)
    assert set(ids(made)) <= set(made.suspects) <= {one.id for one in found}
    assert not any(one.is_referenced for one in made.delete)
    assert policy.lists == 1 or set(ids(made)) <= seen
    assert all(policy.is_over(one.created_at or OLD, NOW) for one in made.delete)
    assert policy.deleted_at_once is None or len(made.delete) <= policy.deleted_at_once * len(ResourceKind)
