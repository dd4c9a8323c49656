"""After any change, a cache equals a complete load."""

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from fleet.cells.models import Cell, CellMember, Disruption
from fleet.deployments.planner import UpdatePolicy, policy_as_json
from fleet.faults.models import StepRecord
from fleet.machines.models import Machine, MachineSlot, MachineStatus, ProviderCall
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.planner import PLANNERS
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import CellState, DisruptionCause, NodeState, ProviderAction
from fleet.reconcile.selectors.cache import FleetCache
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE, fleet_view
from fleet.rollouts.models import Rollout
from kernel.leases import lease_take
from kernel.row_cache import FULL_LOOK_EVERY_S
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.kernel.servers_away import statement_breaks_off

pytestmark = pytest.mark.django_db(transaction=True)  # in one transaction all rows would have the same version

NODES, CELLS = 8, 3
MICROSECONDS = timedelta(microseconds=123_457)


def assert_same(cache: FleetCache, now: datetime, told: str) -> None:
    settings = FleetSettings()
    incremental, whole = fleet_view(now=now, cache=cache), fleet_view(now=now)
    assert incremental == whole, told
    assert [*incremental.nodes, *incremental.cells] == [*whole.nodes, *whole.cells], told
    for planner in PLANNERS:
        assert planner(incremental, settings, now) == planner(whole, settings, now), told


def _move_node(chance: random.Random, now: datetime) -> None:
    Node.objects.filter(id=_node(chance)).update(state=chance.choice(list(NodeState)), state_since=now)


def _report(chance: random.Random, now: datetime) -> None:
    told = NodeReport.objects.filter(node_id=_node(chance))
    told.update(
        last_seen_at=now + MICROSECONDS,
        connected=chance.random() < 0.8,
        cell=_cell(chance),
        generation=1,
        state=chance.choice(["ready", "failed", "idle"]),
        unhealthy_since=chance.choice([None, now]),
        health=chance.choice([None, {"ok": False, "reason": "slow"}]),
        load=chance.choice([None, {"in_flight": chance.randrange(9)}]),
    )


def _count(chance: random.Random, now: datetime) -> None:
    """Counters of a leader whose cell is compared: the only column outside the view."""
    for member in CellMember.objects.filter(rank=0, cell=_cell(chance)).select_related("cell"):
        told = NodeReport.objects.filter(node=member.node)
        told.update(
            cell=member.cell_id, generation=member.cell.generation, load={"requests_total": chance.randrange(99)}
        )


def _forget_report(chance: random.Random, now: datetime) -> None:
    NodeReport.objects.filter(node_id=_node(chance)).delete()


def _describe(chance: random.Random, now: datetime) -> None:
    status = chance.choice(list(ProviderStatus))
    MachineStatus.objects.update_or_create(node_id=_node(chance), defaults={"status": status, "described_at": now})


def _order(chance: random.Random, now: datetime) -> None:
    node = _node(chance)
    if ProviderCall.objects.filter(node_id=node).delete()[0] == 0:
        ProviderCall.objects.create(
            node_id=node, action=ProviderAction.RESTART_AGENT, reason="", requested_at=now, due_at=now
        )


def _move_cell(chance: random.Random, now: datetime) -> None:
    states = [state for state in CellState if state is not CellState.STOPPED]
    Cell.objects.filter(id=_cell(chance)).update(state=chance.choice(states), state_since=now, unrouted_at=now)


def _stop_or_bring_back(chance: random.Random, now: datetime) -> None:
    cell = Cell.objects.get(id=_cell(chance))
    cell.state = CellState.PENDING if cell.state == CellState.STOPPED else CellState.STOPPED
    cell.save()
    cell.members.all().delete()


def _swap_member(chance: random.Random, now: datetime) -> None:
    if members := list(CellMember.objects.order_by("node_id")):
        chance.choice(members).delete()
    cell = Cell.objects.get(id=_cell(chance))
    free = chance.choice(Node.objects.filter(member=None).order_by("id"))
    if cell.state != CellState.STOPPED:
        CellMember.objects.create(cell=cell, node=free, rank=max((m.rank for m in cell.members.all()), default=-1) + 1)


def _disrupt(chance: random.Random, now: datetime) -> None:
    cell = Cell.objects.get(id=_cell(chance))
    if not Disruption.objects.filter(cell=cell, closed_at=None).update(closed_at=now):
        cause = chance.choice(list(DisruptionCause))
        Disruption.objects.create(
            cell=cell, deployment=cell.deployment, region=cell.region, cause=cause, reason="", opened_at=now
        )


def _end_machine(chance: random.Random, now: datetime) -> None:
    Node.objects.filter(id=_node(chance)).update(state=NodeState.RETIRED, terminated_at=now)


def _price(chance: random.Random, now: datetime) -> None:
    """A node's machine gets a price, loses it, moves to another node, or ends."""
    machine, node = f"m-{chance.randrange(2)}", _node(chance)
    Machine.objects.filter(runs=node).exclude(id=machine).update(runs="")
    state, price = chance.choice(["taken", "gone"]), chance.choice([None, 2.0, 6.5])
    Machine.objects.filter(id=machine).update(runs=node, state=state, price_per_hour=price)


def _share_device(chance: random.Random, now: datetime) -> None:
    """A node gets a part of a device, or leaves it."""
    node, devices = _node(chance), [chance.randrange(2)]
    MachineSlot.objects.filter(runs=node).update(runs="")
    owns = {"kind": "nvidia", "devices": devices, "share": chance.choice([0.5, 0.5, 1.0])}
    MachineSlot.objects.filter(machine=f"m-{chance.randrange(2)}").update(runs=node, owns=owns)


def _measure_steps(chance: random.Random, now: datetime) -> None:
    window = {"index": chance.randrange(9), "steps": {"3": 100}, "compute_ms": {"3": 9.5}}
    defaults: dict[str, Any] = {"cell": "c0", "generation": 1, "index": 9, "windows": [window]}
    StepRecord.objects.update_or_create(node_id=_node(chance), defaults=defaults)


def _node(chance: random.Random) -> str:
    return f"n-{chance.randrange(NODES)}"


def _cell(chance: random.Random) -> str:
    return f"c{chance.randrange(CELLS)}"


CHANGES: list[Callable[[random.Random, datetime], None]] = [
    *(_move_node, _report, _count, _forget_report, _describe, _order, _move_cell, _stop_or_bring_back, _swap_member),
    *(_disrupt, _end_machine, _measure_steps, _price, _share_device),
]


@pytest.fixture
def fleet() -> None:
    made = [rows.node(f"n-{number}") for number in range(NODES)]
    for number in range(2):
        MachineSlot.objects.create(machine=rows.machine(f"m-{number}"), number=0, owns={})
    for number in range(CELLS):
        rows.cell(f"c{number}", *made[2 * number : 2 * number + 2])
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=3600, now=NOW - timedelta(minutes=10))
    Rollout.objects.create(
        deployment_id="sim-70b",
        from_version=rows.version(),
        to_version=rows.version("2"),
        policy=policy_as_json(UpdatePolicy()),
        region_order=["us-east-1"],
        created_at=NOW,
        state_since=NOW,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_passes_over_what_has_changed_decide_as_passes_over_everything(seed: int) -> None:
    chance, cache, now = random.Random(seed), FleetCache(), NOW
    for first in range(len(CHANGES)):
        now += timedelta(seconds=chance.choice([0.5, 3.0, 20.0]))
        made = [CHANGES[first % len(CHANGES)], *chance.choices(CHANGES, k=chance.randrange(3))]
        for change in made:
            change(chance, now)
        emptied = Cell.objects.filter(members=None).exclude(state=CellState.STOPPED)
        emptied.update(state=CellState.PENDING)  # no cell serves without a member
        assert_same(cache, now, f"seed {seed}, after {[change.__name__ for change in made]}")
        assert_same(cache, now + timedelta(minutes=1), f"seed {seed}, with nothing changed but the time")


@pytest.mark.usefixtures("fleet")
def test_a_look_that_breaks_off_in_the_middle_loses_nothing() -> None:
    cache = FleetCache()
    fleet_view(now=NOW, cache=cache)
    _move_cell(random.Random(1), NOW)

    with statement_breaks_off("fleet_disruption"):
        fleet_view(now=NOW, cache=cache)
    assert_same(cache, NOW, "after a look that broke off")


@pytest.mark.usefixtures("fleet")
def test_everything_is_looked_at_now_and_then() -> None:
    at_s = [0.0]
    cache = FleetCache(now_s=lambda: at_s[0])
    fleet_view(now=NOW, cache=cache)
    del cache._nodes.rows["n-7"], cache._node_views["n-7"]
    assert "n-7" not in fleet_view(now=NOW, cache=cache).nodes
    at_s[0] += FULL_LOOK_EVERY_S + 1
    assert_same(cache, NOW, "after a full look")
