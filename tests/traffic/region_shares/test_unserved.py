"""An incident stays open while a region cannot serve a deployment, with evidence."""

import pytest

from controlplane.dashboard.overview import status_of
from fleet.cells.models import Cell, Disruption
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident
from fleet.faults.pages import fleet_health
from fleet.faults.planning.views import NO_USABLE_CELL, REGION_LOST
from fleet.faults.services.incidents import incident_dismiss, incident_open
from fleet.load.models import RefusedRequests
from fleet.nodes.models import NodeReport
from fleet.reconcile.planning.states import CellState, IncidentState
from tests.fleet.rows import NOW
from tests.traffic.steered import EAST, WEST, Steered
from traffic.region_shares.planning.policy import EvacuationMode
from traffic.region_shares.services.overrides import Terms, evacuation_start

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet() -> Steered:
    steered = Steered({EAST: 2, WEST: 2}, {EAST: 8.0, WEST: 4.0})
    steered.run(20)
    return steered


def refuse(count: int, steered: Steered) -> None:
    RefusedRequests.objects.update_or_create(
        ingress="i-us-east-1", deployment="sim-70b",
        defaults={"region": EAST, "since": "a", "codes": {"no_ready_cell": count}, "total": count, "at": steered.now},
    )  # fmt: skip


def opened() -> list[Incident]:
    return list(Incident.objects.filter(kind=NO_USABLE_CELL, state=IncidentState.OPEN))


@pytest.mark.slow
def test_an_outage_opens_one_incident_with_its_evidence_and_closes_it_when_cells_serve(fleet: Steered) -> None:
    assert opened() == []
    refuse(3, fleet)
    fleet.lose(EAST, 2)
    fleet.run(4)
    assert opened() == [], "five seconds"
    refuse(10, fleet)
    fleet.run(6)
    (incident,) = opened()
    assert (incident.subject, incident.region, incident.deployment) == ("sim-70b@us-east-1", EAST, "sim-70b")
    assert incident.evidence["refused"] == {"no_ready_cell": 7}
    assert incident.evidence["served_by"] == [WEST]
    assert [cell["state"] for cell in incident.evidence["cells"]] == ["lost", "lost"]
    refuse(40, fleet)
    fleet.run(6)
    assert opened()[0].evidence["refused"] == {"no_ready_cell": 37}
    fleet.recover(EAST)
    fleet.run(16)
    assert opened() == []
    assert "its cells serve again" in Incident.objects.get(kind=NO_USABLE_CELL).resolution
    fleet.run(60)
    assert Incident.objects.filter(kind=NO_USABLE_CELL).count() == 1


@pytest.mark.slow
def test_a_region_that_comes_and_goes_has_one_incident(fleet: Steered) -> None:
    for _ in range(5):
        fleet.lose(EAST, 2)
        fleet.run(8)
        fleet.recover(EAST)
        fleet.run(4)
    assert Incident.objects.filter(kind=NO_USABLE_CELL).count() == 1


@pytest.mark.slow
def test_a_rollout_that_takes_the_only_cell_down_opens_none(fleet: Steered) -> None:
    for cell in Cell.objects.filter(region_id=EAST):
        Disruption.objects.create(
            cell=cell, deployment=cell.deployment, region=cell.region, cause="rollout", reason="v2", opened_at=fleet.now
        )
    Cell.objects.filter(region_id=EAST).update(state=CellState.STARTING.value)
    fleet.run(60)
    assert opened() == []


@pytest.mark.slow
def test_what_is_scaled_to_zero_and_woken_again_opens_none(fleet: Steered) -> None:
    places = DeploymentRegion.objects.filter(region_id=EAST)
    places.update(cells=0)
    Cell.objects.filter(region_id=EAST).update(state=CellState.STOPPED.value)
    fleet.run(20)
    places.update(cells=1)
    Cell.objects.filter(region_id=EAST).update(state=CellState.STARTING.value)
    fleet.run(30)
    assert opened() == []


@pytest.mark.slow
def test_an_evacuated_region_opens_none(fleet: Steered) -> None:
    terms = Terms(duration_s=600, why="a test", actor="ada", now=fleet.now)
    evacuation_start(region=EAST, mode=EvacuationMode.REAL.value, confirm=EAST, terms=terms)
    fleet.run(10)
    fleet.lose(EAST, 2)
    fleet.run(30)
    assert opened() == []


@pytest.mark.slow
def test_one_that_was_dismissed_is_quiet_for_its_time(fleet: Steered) -> None:
    fleet.lose(EAST, 2)
    fleet.run(10)
    incident_dismiss(incident_id=opened()[0].pk, actor="ada", now=fleet.now)
    fleet.run(20)
    assert opened() == []


def test_an_outage_is_broken_on_the_overview(fleet: Steered) -> None:
    fleet.lose(EAST, 2)
    fleet.run(10)
    assert opened()[0] in status_of(fleet_health(), 0, fleet.now).incidents


def run_with_agents(fleet: Steered, seconds: int) -> None:
    for _ in range(0, seconds, Steered.REPORT_EVERY_S):
        NodeReport.objects.update(connected=True, last_seen_at=fleet.now)
        fleet.run(Steered.REPORT_EVERY_S)


@pytest.mark.slow
def test_a_region_whose_ingress_is_silent_is_one_incident_until_it_reports(fleet: Steered) -> None:
    fleet.silent = {EAST}
    run_with_agents(fleet, 40)
    (incident,) = Incident.objects.filter(state=IncidentState.OPEN)
    assert (incident.kind, incident.subject, incident.region) == (REGION_LOST, EAST, EAST)
    assert incident.evidence["ingresses"][0]["silent_s"] >= 30
    fleet.silent = set()
    run_with_agents(fleet, 20)
    incident.refresh_from_db()
    assert (incident.state, incident.resolution) == (IncidentState.CLOSED, "it serves again")


def test_the_incidents_of_deployments_become_the_one_of_their_lost_region() -> None:
    for name in ("sim-70b", "sim-8b"):
        where = {"region": EAST, "deployment": name}
        incident_open(kind=NO_USABLE_CELL, subject=f"{name}@{EAST}", summary=name, evidence={}, now=NOW, **where)
    lost = incident_open(kind=REGION_LOST, subject=EAST, summary="lost", evidence={"n": 2}, now=NOW, region=EAST)
    first, second = Incident.objects.order_by("id")
    assert (first.pk, first.kind, first.deployment, first.state) == (lost.pk, REGION_LOST, "", IncidentState.OPEN)
    assert (second.state, second.resolution) == (IncidentState.CLOSED, f"part of incident {lost.pk}")
