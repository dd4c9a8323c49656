"""Reported speculation counters open and close incidents of their deployment."""

from typing import Any

import msgspec
import pytest

from engine_agent.protocol.load_messages import Load, SpeculationLoad
from fleet.cells.models import Cell
from fleet.faults.models import Incident
from fleet.faults.planning.drift import SPECULATION_DRIFT
from fleet.faults.selectors.faults import FRESH_FOR
from fleet.faults.services.watch import speculation_drift_check
from fleet.nodes.models import NodeReport
from models_registry.speculation.services import calibration_store
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.rows import DOCUMENT, with_heads

pytestmark = pytest.mark.django_db

BAD, GOOD = SpeculationLoad(3600.0, 5000, 10000, 10), SpeculationLoad(3600.0, 5000, 10000, 9000)


@pytest.fixture(autouse=True)
def cell() -> None:
    rows.cell("c", rows.node("n-a"), rows.node("n-b"))
    version = with_heads()
    calibration_store(version_id=version.pk, document=DOCUMENT, step_costs=[], actor="ada", now=NOW)
    Cell.objects.update(model_version=version)


def says(node: str, guesses: SpeculationLoad | None, **more: Any) -> None:
    load = msgspec.to_builtins(Load(speculation=guesses))
    NodeReport.objects.filter(node=node).update(load=load, **{"cell": "c", "last_seen_at": NOW, **more})


def opened() -> list[str]:
    speculation_drift_check(now=NOW)
    return list(Incident.objects.filter(kind=SPECULATION_DRIFT, state="open").values_list("subject", flat=True))


def test_a_deployment_that_guesses_worse_has_an_incident_until_it_is_well_again() -> None:
    says("n-a", BAD)
    assert opened() == opened() == ["sim-70b"]
    incident = Incident.objects.get(kind=SPECULATION_DRIFT)
    assert (incident.deployment, incident.evidence["version"]) == ("sim-70b", "toy@1")
    says("n-a", None)
    assert opened() == ["sim-70b"], "it says nothing now"
    says("n-a", GOOD)
    assert opened() == []


def test_followers_old_reports_and_versions_without_a_calibration_open_none() -> None:
    says("n-b", BAD)
    assert opened() == []
    says("n-a", BAD, last_seen_at=NOW - FRESH_FOR)
    assert opened() == []
    says("n-a", BAD, cell="other")
    assert opened() == [], "a leader speaks of its own cell"
    says("n-a", BAD)
    Cell.objects.update(model_version=rows.version())
    assert opened() == []


def test_what_cannot_be_meant_breaks_nothing() -> None:
    says("n-a", SpeculationLoad(1e300, 2**80, -5, 2**80))
    assert opened() == []
