"""From reports of ingresses and cells to rows of demand."""

from datetime import date, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.nodes.models import NodeReport
from kernel.leases import lease_take
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.demand.models import DemandDay
from traffic.demand.services import LEASE, DemandMeter, demand_trim
from traffic.routing.models import IngressReport
from traffic.routing.services.ingresses import ingress_create

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

EAST, WEST = "us-east-1", "us-west-2"
SLOT = timedelta(minutes=5)
BEGAN = NOW.replace(minute=0, second=0, microsecond=0)
NUMBER = BEGAN.hour * 12


class Metered:
    """Two regions with an ingress each, and a planner that samples every 10 s."""

    def __init__(self) -> None:
        self.now = BEGAN - timedelta(seconds=10)
        self.meter = DemandMeter()
        self.pools: dict[str, dict[str, object]] = {EAST: {"in_flight": 12}, WEST: {"in_flight": 4}}
        for port, region in enumerate((EAST, WEST)):
            rows.deployment(where=region)
            ingress = ingress_create(region=rows.region(region), address="127.0.0.1", port=8080 + port, now=NOW)
            IngressReport.objects.create(ingress=ingress, connected=True, revision=1)

    def look(self, seconds: float, silent: tuple[str, ...] = ()) -> int:
        """Advances time; returns the number of series that got a slot."""
        written, until = 0, self.now + timedelta(seconds=seconds)
        while self.now < until:
            self.now += timedelta(seconds=10)
            for region in {EAST, WEST} - set(silent):
                telemetry = {"pools": {"sim-70b": self.pools[region]}}
                reports = IngressReport.objects.filter(ingress__region_id=region)
                reports.update(last_seen_at=self.now, telemetry=telemetry)
            written += self.meter.sample(now=self.now)
        return written


def loads(origin: str = EAST, serving_class: str = "realtime") -> list[float | None]:
    """Loads from the first measured slot on."""
    found = DemandDay.objects.filter(origin=origin, serving_class=serving_class, day=BEGAN.date()).first()
    return found.loads[NUMBER:] if found else []


def test_each_slot_gets_its_mean_once_it_is_over() -> None:
    fleet = Metered()
    assert fleet.look(290) == 0
    fleet.pools[EAST] = {"in_flight": 24}
    assert fleet.look(310) == 2
    assert fleet.look(300) == 2

    assert loads()[0] == pytest.approx(12.4, abs=0.5)
    assert loads()[1:] == [24.0]
    assert loads(WEST) == [4.0, 4.0]


def test_a_region_that_is_silent_for_long_leaves_a_hole() -> None:
    fleet = Metered()
    fleet.look(300)
    fleet.look(300, silent=(EAST,))
    fleet.look(310)

    assert loads() == [12.0, None, 12.0]
    assert loads(WEST) == [4.0, 4.0, 4.0]


def test_a_planner_that_begins_in_the_middle_of_a_slot_leaves_a_hole() -> None:
    fleet = Metered()
    fleet.look(310)
    fleet.meter = DemandMeter()
    fleet.look(290)
    fleet.meter = DemandMeter()
    fleet.look(600)

    assert loads() == [12.0, None, 12.0]


def test_what_is_spilled_counts_where_it_came_from() -> None:
    fleet = Metered()
    fleet.pools = {
        EAST: {"in_flight": 10, "spilled_in_flight": 5, "spilled_to": {WEST: 50}},
        WEST: {"in_flight": 7},
    }
    fleet.look(310)

    assert (loads(EAST), loads(WEST)) == ([15.0], [2.0])


def test_classes_are_split_as_leaders_report_them() -> None:
    fleet = Metered()
    node = rows.node("n-00000001", where=EAST)
    cell = rows.cell("c-1", node, region=rows.region(EAST))
    said = {"realtime": {"in_flight": 1}, "batch": {"in_flight": 2}, "x" * 16: {"in_flight": 9}}
    report = NodeReport.objects.update_or_create(node=node, defaults={"cell": cell.id, "load": {"classes": said}})[0]
    for _ in range(31):
        NodeReport.objects.filter(pk=report.pk).update(last_seen_at=fleet.now)
        fleet.look(10)

    assert (loads(), loads(serving_class="batch")) == ([4.0], [8.0])
    assert set(DemandDay.objects.values_list("serving_class", flat=True)) == {"realtime", "batch"}


def test_days_follow_each_other() -> None:
    fleet = Metered()
    fleet.now = BEGAN.replace(hour=23, minute=55) - timedelta(seconds=5)
    fleet.look(610)

    days = {row.day: row.loads for row in DemandDay.objects.filter(origin=EAST)}
    assert days[BEGAN.date()][-1] == 12.0
    assert len(days[BEGAN.date()]) == 288
    assert days[BEGAN.date() + timedelta(days=1)] == [12.0]


def test_one_planner_measures_at_a_time() -> None:
    fleet = Metered()
    lease_take(name=LEASE, holder="another", ttl_s=3600, now=fleet.now)

    assert fleet.look(610) == 0
    assert not DemandDay.objects.exists()


def test_a_deployment_that_goes_takes_its_demand_along() -> None:
    fleet = Metered()
    fleet.look(290)
    Cell.objects.all().delete()
    Deployment.objects.all().delete()
    fleet.look(20)

    assert not DemandDay.objects.exists()


def test_a_slot_is_written_in_one_statement() -> None:
    fleet = Metered()
    fleet.look(295)
    with CaptureQueriesContext(
        connection,
    ) as seen:
        assert fleet.look(10) == 2
    assert sum("traffic_demandday" in query["sql"] and "INSERT" in query["sql"] for query in seen) == 1


def test_days_are_kept_for_five_weeks() -> None:
    fleet = Metered()
    fleet.look(310)
    DemandDay.objects.filter(origin=WEST).update(day=date(2020, 1, 1))

    demand_trim(now=fleet.now + timedelta(days=30))

    assert set(DemandDay.objects.values_list("origin_id", flat=True)) == {EAST}
