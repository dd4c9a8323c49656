"""API calls of the loop of an AWS region; the fleet's other loops make none."""

from datetime import timedelta
from typing import Any

import pytest

from bench.fleet.cloud_calls import MINUTES, MadeUpAws, by_bucket, faults, make_region, run_loop
from fleet.cells.models import Cell, CellMember
from fleet.clouds.planning.call_budget import steady_calls
from fleet.machines.models import Machine
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import NodeState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.reconcile.services import reconcile
from kernel.leases import lease_take
from tests.fleet import rows

pytestmark = pytest.mark.slow

MACHINES = 210
"""Three calls know their places."""
TICK_S = 60.0


@pytest.mark.long
@pytest.mark.django_db(transaction=True)  # the loop's rounds use their own connections
def test_a_region_costs_the_calls_that_its_intervals_promise() -> None:
    make_region(MACHINES)
    aws = MadeUpAws(MACHINES)
    run_loop(aws, MINUTES, TICK_S)
    assert len(aws.placed) == MACHINES
    aws.calls.clear()

    run_loop(aws, MINUTES, TICK_S)

    promised = {bucket: round(a_minute * MINUTES) for bucket, a_minute in steady_calls(MACHINES).items()}
    assert by_bucket(aws.calls) == promised
    assert faults(aws, MINUTES) == []


@pytest.mark.django_db
def test_a_pass_of_the_reconciler_makes_no_client_of_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts a cell, heals another whose machine is gone, and buys machines for more."""

    def nobody(*_: Any) -> Any:
        raise AssertionError("a session of boto3 was made")

    monkeypatch.setattr("fleet.clouds.aws.calls._make_client", nobody)
    monkeypatch.setattr("fleet.clouds.aws.calls._session", nobody)
    monkeypatch.setattr("fleet.clouds.aws.calls._clients", {})
    monkeypatch.setattr("kernel.clock.now", lambda: rows.NOW)
    rows.region(provider="aws")
    rows.deployment(cells=3)
    cell = rows.cell("sim-70b-us-east-1-9", *(rows.node(f"n-{number:08x}") for number in range(2)))
    for number in range(2, 4):
        rows.node(f"n-{number:08x}")
    for node in Node.objects.all():
        Machine.objects.create(
            id=f"m{node.id[1:]}", provider="aws", provider_id=f"i{node.id[1:]}", region_id=node.region_id,
            state="taken", runs=node.id, cloud_state="running", created_at=rows.NOW,
            state_since=rows.NOW,
        )  # fmt: skip
    lost = CellMember.objects.get(cell=cell, rank=1).node_id
    NodeReport.objects.filter(node_id=lost).update(state="failed", reason="it is gone")
    Machine.objects.filter(runs=lost).update(cloud_state="terminated")

    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=3600, now=rows.NOW - timedelta(minutes=10))

    assert reconcile() > 1

    assert Cell.objects.exclude(id=cell.id).exists()
    assert Node.objects.filter(state=NodeState.JOINING).exists()
