"""After all machines were stopped, the same cells start on the same nodes one generation later. Running machines are
left alone."""

import pytest

from fleet.cells.models import Cell, CellMember
from fleet.clouds.base import ProviderError
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import embedded_fleet_resume
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import CellState, NodeState
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    made.name = "local"
    monkeypatch.setattr("fleet.nodes.services.nodes.embedded_providers", lambda: [made])
    return made


def state(cell: str) -> tuple[str, int]:
    row = Cell.objects.get(id=cell)
    return row.state, row.generation


def test_stopped_machines_boot_and_their_cells_start_whole_on_the_same_nodes(machines: Cloud) -> None:
    rows.cell("c1", rows.node("n-b"), rows.node("n-a"))
    rows.node("n-spare")
    assert embedded_fleet_resume(now=NOW) == 3
    assert machines.restarted == ["n-a", "n-b", "n-spare"]
    assert state("c1") == ("starting", 2)
    assert list(CellMember.objects.order_by("rank").values_list("node_id", flat=True)) == ["n-b", "n-a"]


def test_what_still_runs_is_left_alone(machines: Cloud) -> None:
    machines.status = ProviderStatus.RUNNING
    machines.statuses = {"n-c": ProviderStatus.AGENT_DEAD}
    rows.cell("c1", rows.node("n-a"), rows.node("n-c"))
    assert embedded_fleet_resume(now=NOW) == 0
    assert machines.restarted == []
    assert state("c1") == ("ready", 1)


@pytest.mark.parametrize("other", [CellState.FAILED, CellState.LOST, CellState.DRAINING])
def test_cells_on_another_way_are_left_to_the_reconciler(other: CellState) -> None:
    rows.cell("c1", rows.node("n-a"), state=other)
    embedded_fleet_resume(now=NOW)
    assert state("c1") == (other, 1)


@pytest.mark.parametrize("dead", [NodeState.LOST, NodeState.RETIRED])
def test_dead_nodes_stay_dead(machines: Cloud, dead: NodeState) -> None:
    rows.node("n-a", state=dead)
    assert embedded_fleet_resume(now=NOW) == 0


def test_nodes_of_other_providers_are_not_ours_to_boot(machines: Cloud) -> None:
    rows.region("us-east-1", provider="aws")
    rows.node("n-a")
    assert embedded_fleet_resume(now=NOW) == 0


def test_a_cell_with_a_node_that_cannot_be_used_stays_as_it_is_and_the_others_start(machines: Cloud) -> None:
    rows.cell("c1", rows.node("n-a"), rows.node("n-b", state=NodeState.SUSPECT))
    rows.cell("c2", rows.node("n-c"))
    assert embedded_fleet_resume(now=NOW) == 3
    assert (state("c1"), state("c2")) == (("ready", 1), ("starting", 2))


def test_a_machine_that_does_not_boot_holds_up_no_other(machines: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = machines.restart_agent

    def folder_gone(node: str) -> None:
        if node == "n-a":
            raise ProviderError("cannot start the agent of n-a again: no folder")
        boot(node)

    monkeypatch.setattr(machines, "restart_agent", folder_gone)
    rows.node("n-a"), rows.node("n-b")
    assert embedded_fleet_resume(now=NOW) == 1
    assert Node.objects.get(id="n-a").state == NodeState.READY, "the reconciler sees that it is gone"
