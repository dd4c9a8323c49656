"""Whole passes on real PostgreSQL in a region whose pool is too small: an urgent cell waits, another deployment drains
one for it, and the urgent cell starts on its machines."""

from datetime import timedelta

import pytest

from engine_agent.protocol.states import EngineState
from fleet.cells.models import Cell, CellMember, Disruption
from fleet.cells.services import cell_mark_unrouted
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.machines.planner import POOLED
from fleet.nodes.models import NodeReport
from fleet.quotas.models import Quota
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.reconcile.services import reconcile
from kernel import clock
from kernel.leases import lease_take
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.provision import Clock
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(clock, "now", made)
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=7200, now=NOW - timedelta(minutes=10))
    return made


@pytest.fixture(autouse=True)
def fleet() -> None:
    """Two batch cells on all four machines of a pool. A minute ago one of `chat` was requested."""
    rows.region("us-east-1", provider=POOLED)
    night = rows.deployment("night", cells=2)
    Deployment.objects.filter(name="night").update(serving_class="batch", next_ordinal=9)
    for number in range(2):
        members = [rows.node(f"n-{number}{rank}", spare_since=None) for rank in range(2)]
        rows.cell(f"night-us-east-1-{number}", *members, deployment=night, state_since=NOW - timedelta(hours=1))
    rows.deployment("chat", cells=1)
    DeploymentRegion.objects.exclude(deployment__in=["chat", "night"]).delete()


def run(time: Clock, seconds: float, every_s: float = 10.0) -> None:
    """Time passes, agents report, ingresses stop routing to draining cells, and the reconciler runs passes."""
    for _ in range(int(seconds / every_s)):
        time.now += timedelta(seconds=every_s)
        idle = {"cell": "", "generation": 0, "state": EngineState.IDLE.value}
        NodeReport.objects.update(last_seen_at=time.now, **idle)
        for member in CellMember.objects.select_related("cell"):
            state = {"cell": member.cell_id, "generation": member.cell.generation, "state": EngineState.READY.value}
            NodeReport.objects.filter(node=member.node).update(**state)
        for cell in Cell.objects.filter(state="draining"):
            cell_mark_unrouted(cell_id=cell.id, generation=cell.generation, now=time.now)
        reconcile()


def ready() -> dict[str, int]:
    return {
        name: Cell.objects.filter(deployment=name, state="ready").count() for name in ("chat", "night")
    }  # fmt: skip


@pytest.mark.slow
def test_batch_makes_room_and_gets_its_cell_back_when_nobody_needs_the_machines(time: Clock) -> None:
    run(time, 30)
    assert ready() == {"chat": 0, "night": 2}, "it has not waited long enough"
    run(time, 100)
    assert ready() == {"chat": 1, "night": 1}
    entry = Disruption.objects.get()
    assert (entry.cause, entry.deployment_id, entry.closed_at is not None) == ("preemption", "night", True)
    kinds = set(Event.objects.values_list("kind", flat=True))
    assert {"deployment.preempted", "deployment.preempts"} <= kinds
    DeploymentRegion.objects.filter(deployment="chat").update(cells=0)
    run(time, 400, every_s=50.0)
    assert ready() == {"chat": 0, "night": 1}, "what was taken is kept for ten minutes"
    run(time, 300, every_s=30.0)
    assert ready() == {"chat": 0, "night": 2}
    assert DeploymentRegion.objects.get(deployment="night").cells_granted is None
    assert Event.objects.filter(kind="deployment.returned", deployment="night").exists()


def test_who_says_that_its_cells_may_not_be_taken_keeps_them(time: Clock) -> None:
    Deployment.objects.filter(name="night").update(preemptible=False)
    run(time, 150, every_s=30.0)
    assert ready() == {"chat": 0, "night": 2}


@pytest.mark.slow
def test_the_owner_gets_back_what_another_team_has_borrowed(time: Clock) -> None:
    Deployment.objects.filter(name="night").update(team="night", preemptible=False, priority=9)
    Deployment.objects.filter(name="chat").update(team="search", priority=0)
    for team in ("night", "search"):
        Quota.objects.create(
            name=f"{team}:{rows.KIND}", team=team, instance_type_id=rows.KIND, machines=2, changed_at=NOW
        )
    run(time, 120)
    assert ready() == {"chat": 1, "night": 1}
    place = DeploymentRegion.objects.get(deployment="night")
    assert (place.cells_granted, place.grant_rule) == (1, "reclaim")
    assert place.grant_reason == (f"team night has 2 of 2 {rows.KIND}; nothing more can be borrowed: search has 2 of 2")
