"""The snapshot is complete, and its number of queries does not depend on its size."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from engine_agent.protocol.states import EngineState
from fleet.clouds.models import CloudNotice
from fleet.faults.planning.views import NoticeView
from fleet.machines.models import Machine, MachineStatus
from fleet.nodes.models import Node
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import CellState, MachineRole, MachineState, NodeState, NoticeKind, NoticeSource
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE, fleet_view
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from kernel.leases import lease_take
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db


def queries() -> int:
    with CaptureQueriesContext(connection) as captured:
        fleet_view(now=NOW)
    return len(captured)


def test_a_view_of_thirty_cells_asks_as_often_as_one_of_five() -> None:
    query_counts = []
    for count in (5, 25):
        for index in range(count):
            rows.cell(f"c{count}-{index}", rows.node(f"n-{count}-{index}-0"), rows.node(f"n-{count}-{index}-1"))
        query_counts.append(queries())
    assert query_counts[0] == query_counts[1] <= 31


def test_cells_come_with_their_members_in_rank_order_and_stopped_ones_not_at_all() -> None:
    rows.cell("c1", rows.node("n-z"), rows.node("n-a"), unrouted_at=NOW, restarts=2)
    rows.cell("c2", state=CellState.STOPPED)
    (cell,) = fleet_view(now=NOW).cells.values()
    assert [(member.node, member.rank) for member in cell.members] == [("n-z", 0), ("n-a", 1)]
    assert (cell.unrouted_at, cell.restarts, cell.state) == (NOW, 2, CellState.READY)


def test_nodes_come_with_their_last_report_and_what_the_provider_said() -> None:
    rows.cell("c1", rows.node("n-a", report={"health": {"reason": "slow"}, "load": {"in_flight": 3}}))
    Node.objects.create(
        id="n-new", region=rows.region(), instance_type_id=KIND, port_base=1, created_at=NOW, state_since=NOW
    )
    MachineStatus.objects.create(node_id="n-new", status=ProviderStatus.GONE, described_at=NOW)
    view = fleet_view(now=NOW)
    report, silent = view.nodes["n-a"].report, view.nodes["n-new"]
    assert (report.cell, report.generation, report.state) == ("c1", 1, EngineState.READY)
    assert (report.health_reason, report.in_flight, report.last_seen_at) == ("slow", 3, NOW)
    assert (silent.report.connected, silent.report.last_seen_at, silent.provider) == (False, None, ProviderStatus.GONE)


@pytest.mark.parametrize(
    ("parallelism", "policy", "problem"),
    [({"trn1.2xlarge": {"nodes": 2}}, {}, "local.cpu"), ({KIND: {"nodes": 2}}, {"surge": -1}, "surge is -1")],
)
def test_a_deployment_that_makes_no_sense_says_so_and_stops_no_other(
    parallelism: dict[str, Any], policy: dict[str, Any], problem: str
) -> None:
    rows.cell()
    odd = rows.deployment("odd")
    odd.model_version = rows.version("odd", parallelism=parallelism)
    odd.update_policy = policy
    odd.save()
    deployments = fleet_view(now=NOW).deployments
    assert problem in deployments["odd"].problem
    assert (deployments["sim-70b"].problem, deployments["sim-70b"].nodes_per_cell) == ("", 2)


def test_a_rollout_that_cannot_be_read_is_a_problem_of_its_deployment() -> None:
    rollout = Rollout.objects.create(
        deployment=rows.deployment(),
        from_version=rows.version(),
        to_version=rows.version("2"),
        policy={"speed": 3},
        region_order=["us-east-1"],
        created_at=NOW,
        state_since=NOW,
    )
    view = fleet_view(now=NOW)
    assert view.deployments["sim-70b"].problem.startswith(f"rollout {rollout.pk}: there is no speed")
    assert view.rollouts == {}


def test_a_retired_node_is_left_out_unless_a_cell_still_names_it_or_its_machine_may_run() -> None:
    rows.node("n-gone", state=NodeState.RETIRED, terminated_at=NOW)
    rows.node("n-runs", state=NodeState.RETIRED)
    rows.cell("c1", rows.node("n-named", state=NodeState.RETIRED, terminated_at=NOW))
    assert set(fleet_view(now=NOW).nodes) == {"n-named", "n-runs"}


def test_a_deployment_says_how_many_cells_each_region_should_have_and_of_how_many_nodes() -> None:
    rows.deployment(cells=2)
    rows.deployment(cells=3, where="us-west-2")
    deployment = fleet_view(now=NOW).deployments["sim-70b"]
    assert deployment.cells_wanted == {"us-east-1": 2, "us-west-2": 3}
    assert deployment.nodes_per_cell == 2


def test_a_version_says_how_near_its_nodes_must_be_and_a_region_what_it_keeps_for_repair() -> None:
    rows.version(parallelism={KIND: {"nodes": 2, "within": 3}})
    rows.deployment()
    Region.objects.filter(name="us-east-1").update(spares={KIND: {"warm": 2, "repair_only": 1}})
    view = fleet_view(now=NOW)
    deployment, region = view.deployments["sim-70b"], view.regions["us-east-1"]
    assert (deployment.within, deployment.of(deployment.version).within) == (3, 3)
    assert (region.spares, region.repair_only) == ({KIND: 2}, {KIND: 1})


def test_nobody_listens_until_somebody_holds_the_lease_and_when_it_has_run_out() -> None:
    assert fleet_view(now=NOW).listening_since is None
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=5, now=NOW)
    assert fleet_view(now=NOW + timedelta(seconds=4)).listening_since == NOW
    assert fleet_view(now=NOW + timedelta(seconds=5)).listening_since is None


def test_what_a_cloud_announced_is_said_of_the_node_that_its_machine_is_until_it_is_settled() -> None:
    node = rows.node("n-1")
    columns = {
        "provider": "aws",
        "region": node.region,
        "created_at": NOW,
        "state_since": NOW,
        "state": MachineState.TAKEN,
    }
    machine = Machine.objects.create(id="m-1", provider_id="i-1", runs="n-1", **columns)
    ingress = Machine.objects.create(id="m-2", provider_id="i-2", runs="i-1", role=MachineRole.INGRESS, **columns)
    ends_at = NOW + timedelta(minutes=2)
    for about, settled_at in ((machine, None), (machine, NOW), (ingress, None)):
        CloudNotice.objects.create(
            machine=about, kind=NoticeKind.INTERRUPTION, source=NoticeSource.EVENTS,
            at=NOW, ends_at=ends_at, text="said so", settled_at=settled_at,
        )  # fmt: skip
    assert fleet_view(now=NOW).notices == (NoticeView("n-1", NoticeKind.INTERRUPTION, NOW, ends_at, "said so"),)
