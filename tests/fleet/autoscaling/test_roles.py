"""Cells by role on real PostgreSQL: targets, nodes' orders, and cells that are never drained."""

from datetime import timedelta
from typing import Any

import pytest

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.policy import CellPools, CellRange
from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.cells.models import Cell
from fleet.cells.services import cell_create, cell_drain_charged, cell_move, cell_start
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_change, deployment_create, deployment_scale
from fleet.nodes.models import Node
from fleet.nodes.selectors import desired_for
from fleet.reconcile.planning.decisions import CreateCell, DrainCell, MoveCell, StartCell
from fleet.reconcile.planning.states import CellState, DisruptionCause
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.rollouts.services import rollout_propose
from kernel.models import Event
from kernel.refusals import InvalidInput
from kernel.transitions import StaleDecision
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
EAST = "us-east-1"
LATER = NOW + timedelta(minutes=10)


@pytest.fixture
def deployment() -> Deployment:
    return rows.deployment(cells=4, nodes=1)


def scale(cells: Any) -> bool:
    return deployment_scale(name="sim-70b", cells={EAST: cells}, actor="ada", now=NOW)


def place() -> DeploymentRegion:
    return DeploymentRegion.objects.get(region=EAST)


def pair() -> tuple[Cell, Cell]:
    rows.deployment(cells=2, nodes=1)
    prefill = rows.cell("p", rows.node("n-p"), role=CellRole.PREFILL.value)
    return prefill, rows.cell("d", rows.node("n-d"), role=CellRole.DECODE.value)


def told(node: str) -> Any:
    assignment = desired_for([node])[node].assignment
    assert assignment is not None
    return assignment


def versions() -> dict[str, int]:
    return dict(Node.objects.values_list("id", "desired_version"))


@pytest.mark.usefixtures("deployment")
def test_pools_are_stated_with_their_sum_and_a_number_ends_them() -> None:
    assert scale(CellPools(1, 3, 1))
    assert (place().cells, place().split) == (5, RoleSplit(1, 1, 3))
    assert not scale(CellPools(1, 3, 1)), "it is so already"
    event = Event.objects.get(kind="deployment.scaled")
    assert event.message == "sim-70b in us-east-1 from 4 to 5 cells, 1 prefill, 3 decode, 1 mixed, requested by ada"
    assert event.detail["pools"] == {"prefill": 1, "decode": 3, "mixed": 1}

    assert scale(CellRange(2, 8))
    assert place().split == RoleSplit(mixed=5)
    assert scale(CellPools(1, 1))
    assert scale(2)
    assert place().split == RoleSplit(mixed=2)


def test_roles_that_are_planned_stay_when_the_number_changes(deployment: Deployment) -> None:
    scale(CellPools(1, 3))
    deployment_change(name=deployment.pk, actor="ada", now=NOW, scaling={"roles": "planned"})
    assert scale(8)
    assert place().split == RoleSplit(mixed=4, prefill=1, decode=3)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"engine": "llama-cpp", "artifact_uri": "file:///x"},
            "does not hand over",
        ),
        ({"parallelism": {rows.KIND: {"nodes": 2}}}, "its cells have 2 nodes"),
        ({"adapters": [{"name": "x"}]}, "keep its cells mixed"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_by_name(
    deployment: Deployment, columns: dict[str, Any], words: str
) -> None:
    type(deployment.model_version).objects.update(**columns)
    for change in (
        lambda: scale(CellPools(1, 3)),
        lambda: deployment_change(name="sim-70b", actor="ada", now=NOW, scaling={"roles": "planned"}),
        lambda: deployment_create(
            name="other", model_version="sim-70b@1", instance_types=[rows.KIND], cells={EAST: CellPools(1, 1)},
            actor="ada", now=NOW,
        ),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as refused:
            change()
        assert words in str(refused.value)


@pytest.mark.usefixtures("deployment")
def test_a_rollout_to_a_version_that_hands_nothing_over_is_refused_and_so_is_taking_the_one_that_answers() -> None:
    rows.version("2", nodes=2)
    rows.version("3", nodes=1)
    scale(CellPools(1, 1))
    with pytest.raises(InvalidInput, match="its cells have 2 nodes"):
        rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={})
    with pytest.raises(InvalidInput, match="only cell that answers"):
        rollout_propose(deployment="sim-70b", version="sim-70b@3", policy={})
    surge = {"strategy": "surge", "surge": 2}
    assert rollout_propose(deployment="sim-70b", version="sim-70b@3", policy=surge).splits[EAST].is_apart


@pytest.mark.usefixtures("deployment")
def test_a_role_is_written_with_the_cell_and_its_start() -> None:
    cell_create(CreateCell("sim-70b", EAST, rows.KIND, "wanted", role=CellRole.DECODE), now=NOW)
    cell = Cell.objects.get()
    assert cell.role == "decode"
    rows.node("n-a")
    cell_start(StartCell(cell.id, CellState.PENDING, 0, ("n-a",), "placed", role=CellRole.PREFILL), now=NOW)
    cell.refresh_from_db()
    assert cell.role == "prefill"
    assert fleet_view(now=NOW).cells[cell.id].role is CellRole.PREFILL


def test_the_orders_of_a_pair_name_each_other() -> None:
    prefill, decode = pair()
    reader, answering = told("n-p"), told("n-d")

    assert (reader.cell_role, answering.cell_role) == (CellRole.PREFILL, CellRole.DECODE)
    assert reader.kv_layout == answering.kv_layout != ""
    assert reader.decode_nodes == ("n-d",)
    assert reader.prefill_cells == answering.decode_nodes == ()
    called = answering.prefill_cells[0]
    node = Node.objects.get(id="n-p")
    assert (called.cell, called.generation, called.node) == (prefill.pk, 1, "n-p")
    assert (called.host, called.port, called.kv_port) == (node.address, node.port(0), node.port(1))
    assert called.kv_layout == answering.kv_layout
    assert decode.pk not in {one.cell for one in answering.prefill_cells}


def test_cells_of_other_versions_software_or_places_are_no_pair() -> None:
    prefill, _ = pair()
    other = rows.version("2", nodes=1, artifact_digest="sha256:" + "b" * 64, artifact_uri="file:///other")
    Cell.objects.filter(pk=prefill.pk).update(model_version=other)
    assert told("n-d").prefill_cells == told("n-p").decode_nodes == ()
    Cell.objects.filter(pk=prefill.pk).update(model_version=rows.version())
    assert told("n-d").prefill_cells

    Node.objects.filter(id="n-p").update(fingerprint={"sim.python": "3.12.1"})
    assert told("n-d").prefill_cells == ()
    Node.objects.filter(id="n-d").update(fingerprint={"sim.python": "3.12.1"})
    assert told("n-d").prefill_cells

    Cell.objects.filter(pk=prefill.pk).update(region=rows.region("us-west-2"))
    assert told("n-d").prefill_cells == ()


def test_a_prefill_cell_that_leaves_is_taken_out_of_the_orders_at_once() -> None:
    pair()
    rows.cell("m", rows.node("n-m"))
    before = versions()
    cell_move(MoveCell("p", CellState.READY, 1, CellState.FAILED, "its engine ended"), now=NOW)

    assert versions()["n-d"] == before["n-d"] + 1
    assert versions()["n-m"] == before["n-m"]
    assert told("n-d").prefill_cells == ()


def test_mixed_cells_are_told_of_nobody() -> None:
    rows.deployment(nodes=1)
    rows.cell("m", rows.node("n-m"))
    assignment = told("n-m")

    assert (assignment.cell_role, assignment.kv_layout) == (CellRole.MIXED, "")


def test_roles_have_their_own_options() -> None:
    pair()
    rows.version().__class__.objects.update(roles={"prefill": {"max_concurrency": 4}})

    assert told("n-p").plan.max_concurrency == 4
    assert told("n-d").plan.max_concurrency == 16
    assert told("n-d").prefill_cells[0].max_concurrency == 4


def test_the_ledger_never_takes_the_last_cell_that_answers() -> None:
    pair()
    with pytest.raises(StaleDecision, match="except prefill cells"):
        cell_drain_charged(DrainCell("d", 1, DisruptionCause.ROLE, "to be mixed"), now=LATER)
    cell_drain_charged(DrainCell("p", 1, DisruptionCause.ROLE, "to be mixed"), now=LATER)
    assert Cell.objects.get(id="p").state == "draining"
