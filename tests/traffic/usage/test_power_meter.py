"""An implausible meter opens an incident, from node reports on PostgreSQL, and it closes."""

from datetime import timedelta

import pytest

from fleet.faults.models import Incident
from fleet.faults.services.incidents import incident_dismiss
from fleet.nodes.models import NodeReport
from fleet.regions.models import Region
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.usage.models import CellHour, UsageMark
from traffic.usage.planning.energy import POWER_METER, QUIET_MS
from traffic.usage.services.machine_hours import SUSPICIONS, machine_hours_count

pytestmark = pytest.mark.django_db
LOOK_S = 15


def tell(second: int, *, refused: int = 0, watts: int = 2) -> None:
    """The agent's totals at this second, and its refused readings."""
    ms = max(0, second) * 1000
    meter = {"covers": "host", "since": "a", "microjoules": watts * 1000 * ms, "covered_ms": ms, "refused": refused}
    NodeReport.objects.update(telemetry={"energy": [meter]})
    machine_hours_count(now=NOW + timedelta(seconds=second))


@pytest.fixture(autouse=True)
def machine() -> None:
    rows.cell("c", rows.node("n-a"))
    Region.objects.update(provider="machines")
    for second in (-LOOK_S, 0):
        tell(second)


def opened() -> list[tuple[str, str, str]]:
    rows_there = Incident.objects.filter(kind=POWER_METER, state="open")
    return list(rows_there.values_list("subject", "cell", "deployment"))


@pytest.mark.slow
def test_readings_that_are_refused_one_after_another_open_one_incident_until_they_are_believed() -> None:
    for number in range(1, 5):
        tell(number * LOOK_S, refused=number)
    assert opened() == [("n-a", "c", "sim-70b")]
    incident = Incident.objects.get(kind=POWER_METER)
    assert incident.evidence["refused"] == 3
    assert incident.region == "us-east-1"
    for second in range(5 * LOOK_S, 5 * LOOK_S + QUIET_MS // 1000, LOOK_S):
        tell(second, refused=4)
    assert opened() == []
    assert not UsageMark.objects.filter(source=SUSPICIONS).exists()


def test_watts_that_cannot_be_are_refused_here_and_open_one_too() -> None:
    for number in range(1, 5):
        tell(number * LOOK_S, watts=10**9 * number)
    assert opened() == [("n-a", "c", "sim-70b")]
    assert CellHour.objects.get(hour=NOW, deployment="sim-70b").measured_uj == 0


def test_a_meter_that_restarts_once_has_none() -> None:
    for number in range(1, 20):
        tell(number * LOOK_S, refused=1)
    assert opened() == []


def test_what_an_operator_dismissed_is_quiet_for_an_hour_and_opens_again_while_it_goes_on() -> None:
    for number in range(1, 4):
        tell(number * LOOK_S, refused=number)
    incident = Incident.objects.get(kind=POWER_METER)
    incident_dismiss(incident_id=incident.pk, actor="ada", now=NOW)
    tell(4 * LOOK_S, refused=4)
    assert opened() == []
    tell(4 * LOOK_S + 3600, refused=9)
    tell(5 * LOOK_S + 3600, refused=19)
    assert opened() == [("n-a", "c", "sim-70b")]
