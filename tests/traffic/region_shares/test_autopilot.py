"""The region autopilot on rows: from reports to the shares of routing tables, with its events."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fleet.deployments.models import Deployment
from kernel.leases import lease_take
from kernel.models import Event
from tests.fleet import rows
from tests.traffic.steered import EAST, SLOTS, WEST, Steered
from traffic.region_shares.models import TrafficMatrix, TrafficShift, TrafficWindow
from traffic.region_shares.planning.load import SAMPLES_MAX
from traffic.region_shares.services.autopilot import LEASE, SHIFTS_KEPT, autopilot_run
from traffic.region_shares.services.overrides import Terms, shares_fix, traffic_policy_change

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def kinds(deployment: str = "sim-70b") -> list[str]:
    found = Event.objects.filter(kind__startswith="traffic.", deployment=deployment)
    return list(found.order_by("id").values_list("kind", flat=True))


def test_a_quiet_fleet_serves_itself_and_changes_nothing() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 12.0, WEST: 12.0})
    assert fleet.run(2) == ["sim-70b"], "the first plan"
    assert fleet.run(30) == []
    assert (fleet.row(EAST), fleet.row(WEST)) == ({EAST: 1.0}, {WEST: 1.0})
    seen = TrafficMatrix.objects.get().figures["regions"][EAST]
    assert (seen["demand"], seen["capacity"], seen["load"]) == (pytest.approx(12, abs=0.2), 3 * SLOTS, seen["demand"])


def test_a_region_that_lost_two_thirds_is_relieved_in_the_next_pass() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 15.0, WEST: 12.0})
    fleet.run(20)
    fleet.lose(EAST, 2)
    assert fleet.run(2) == ["sim-70b"]
    assert fleet.row(EAST)[WEST] == pytest.approx(1 - 7.6 / 15, abs=0.02)
    assert fleet.row(WEST) == {WEST: 1.0}
    figures = TrafficMatrix.objects.get().figures
    assert all(one["load"] <= 0.8 * one["capacity_now"] for one in figures["regions"].values())
    shift = TrafficShift.objects.latest("id")
    assert (shift.kind, shift.revision) == ("relief", 2)
    assert "concurrent requests and a tested capacity of 10, of which 80% may be used" in shift.reason
    assert kinds()[-1] == "traffic.shift"
    fleet.recover(EAST)
    fleet.run(58)
    assert TrafficShift.objects.count() == 2, "its minute has not passed"
    fleet.run(80)
    assert fleet.row(EAST) == {EAST: 1.0}
    assert set(TrafficShift.objects.filter(revision__gt=2).values_list("kind", flat=True)) == {"step"}


def test_an_ingress_that_lost_its_table_moves_no_requests() -> None:
    """Its agent starts without its journal, so its reports name no cell until it gets a table."""
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 12.0, WEST: 12.0})
    fleet.run(20)
    fleet.without_table.add(EAST)
    assert fleet.run(4) == []
    assert "us-east-1" in TrafficMatrix.objects.get().held
    fleet.without_table.clear()
    assert fleet.run(60) == []
    assert (fleet.row(EAST), TrafficMatrix.objects.get().held) == ({EAST: 1.0}, "")


def test_a_silent_ingress_holds_the_shares_and_both_ends_of_the_hold_are_events() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 12.0, WEST: 12.0})
    fleet.run(20)
    fleet.silent.add(WEST)
    fleet.lose(EAST, 2)
    fleet.run(14)
    fleet.silent.add(EAST)
    fleet.run(20)
    row = TrafficMatrix.objects.get()
    assert "no fresh report: us-east-1 for" in row.held
    assert row.held_since is not None
    fleet.silent.clear()
    fleet.run(4)
    assert TrafficMatrix.objects.get().held == ""
    assert [kind for kind in kinds() if kind != "traffic.shift"] == ["traffic.held", "traffic.released"]


def test_while_held_an_override_is_carried_out_and_the_hold_continues() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 12.0, WEST: 12.0})
    fleet.run(20)
    fleet.silent |= {EAST, WEST}
    fleet.run(20)
    terms = Terms(duration_s=600, why="a test", actor="ada", now=fleet.now)
    shares_fix(deployment="sim-70b", origin=EAST, shares={EAST: 0.5, WEST: 0.5}, terms=terms)
    assert fleet.run(2) == ["sim-70b"]
    assert fleet.row(EAST) == {EAST: 0.5, WEST: 0.5}
    assert TrafficMatrix.objects.get().held != ""


def test_residency_also_binds_the_stand_by_targets_of_the_tables() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 12.0, WEST: 12.0})
    traffic_policy_change(deployment="sim-70b", stated={"residency": {EAST: [EAST]}}, actor="ada", now=fleet.now)
    fleet.run(20)
    fleet.lose(EAST, 2)
    fleet.run(4)
    assert fleet.row(EAST) == {EAST: 1.0}
    fleet.lose(EAST, 1)
    fleet.run(4)
    assert fleet.row(EAST) == {}, "no region may serve it; the ingress refuses"
    assert "us-east-1" in TrafficMatrix.objects.get().figures["unplaced"]


def test_windows_and_history_stay_bounded() -> None:
    fleet = Steered({EAST: 1, WEST: 1}, {EAST: 1.0, WEST: 1.0})
    fleet.run(100)
    assert all(len(window.samples) <= min(SAMPLES_MAX, 40) for window in TrafficWindow.objects.all())
    TrafficMatrix.objects.update(revision=900)
    TrafficShift.objects.update(revision=700)
    terms = Terms(duration_s=600, why="a test", actor="ada", now=fleet.now)
    shares_fix(deployment="sim-70b", origin=EAST, shares={WEST: 1.0}, terms=terms)
    fleet.run(2)
    assert list(TrafficShift.objects.values_list("revision", flat=True)) == [901]
    assert SHIFTS_KEPT <= 201


def test_one_worker_at_a_time_looks() -> None:
    fleet = Steered({EAST: 1}, {EAST: 1.0})
    lease_take(name=LEASE, holder="another", ttl_s=10, now=fleet.now)
    assert autopilot_run(now=fleet.now) == []
    assert autopilot_run(now=fleet.now + timedelta(seconds=11)) == ["sim-70b"]


def test_a_pass_over_ten_deployments_asks_hardly_more_than_one_over_one() -> None:
    fleet = Steered({EAST: 2, WEST: 2}, {EAST: 1.0, WEST: 1.0})
    fleet.run(10)
    query_counts = []
    for number in range(2):
        with CaptureQueriesContext(connection) as captured:
            autopilot_run(now=fleet.now + timedelta(seconds=2 + 4 * number))
        query_counts.append(len(captured))
        for index in range(9 * (1 - number)):
            base = rows.deployment()
            Deployment.objects.create(
                name=f"d-{index}",
                model_version=base.model_version,
                instance_types=base.instance_types,
                created_at=rows.NOW,
            )
        autopilot_run(now=fleet.now + timedelta(seconds=4 + 4 * number))
    # Reads are constant; each deployment adds one update in a savepoint.
    assert query_counts[1] - query_counts[0] <= 9 * 3
