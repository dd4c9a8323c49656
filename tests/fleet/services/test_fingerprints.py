"""A cell whose nodes run different software does not become ready: its reason, the API and its page say why (I2)."""

import pytest

from fleet.models import Cell
from fleet.planning.reconcile.cell_health import plan_health
from fleet.planning.settings import FleetSettings
from fleet.selectors.snapshot import fleet_view
from fleet.services.reconcile import apply
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

SAME = {"neuron_driver": "2.27.4.0", "sim.engine": "sim 0.1.0"}
SAID = (
    "fingerprint mismatch: rank 1 (n-00000002) differs from rank 0 (n-00000001): "
    "neuron_driver is 2.26.5.0 instead of 2.27.4.0"
)


def judged(cell: Cell) -> Cell:
    """The cell after the planner that moves cells has seen the fleet as it is."""
    for decision in plan_health(fleet_view(now=NOW), FleetSettings(), NOW):
        apply(decision, NOW)
    cell.refresh_from_db()
    return cell


def starting(**other: str) -> Cell:
    """A cell of two nodes that both report a ready engine."""
    leader = rows.node("n-00000001", fingerprint=SAME)
    follower = rows.node("n-00000002", fingerprint={**SAME, **other})
    return rows.cell("sim-70b-us-east-1-1", leader, follower, state="starting")


def test_it_fails_and_everybody_who_looks_reads_why() -> None:
    cell = judged(starting(neuron_driver="2.26.5.0"))
    assert (cell.state, cell.reason) == ("failed", SAID)
    seen = bearer().get(f"/api/v1/cells/{cell.pk}").json()
    assert seen["reason"] == SAID
    assert seen["fingerprints"]["differing"] == [
        {"field": "neuron_driver", "values": {"n-00000001": "2.27.4.0", "n-00000002": "2.26.5.0"}}
    ]
    page = " ".join(fragment(signed_in(), f"/cells/{cell.pk}/", "cell-stack").split())
    assert "neuron_driver is 2.26.5.0 instead of 2.27.4.0" in page


def test_one_of_equal_software_becomes_ready() -> None:
    assert judged(starting()).state == "ready"
