"""Two reconcilers race through a rollout with faults on real PostgreSQL. They never overspend the ledger, give a
machine to two cells, or condemn too many machines together."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from engine_agent.protocol.signatures import FaultSignature
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_scale
from fleet.nodes.services.reports import fault_record
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.rollouts.models import Rollout
from fleet.rollouts.services import rollout_propose, rollout_start
from kernel.leases import lease_take
from models_registry.versions.models import VersionState
from simulator.context import VersionBehaviour
from simulator.fault_injection import engine_crashes, machine_dies
from simulator.invariants import all_well, mixed_versions
from simulator.reconciler import Pace
from simulator.world import World
from tests.fleet import rows
from tests.fleet.reconcile.raced_world import TwoReconcilers, broken_rows, close, raced_world
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db(transaction=True)

REGION, CELLS, SPARES = "us-east-1", 5, 3
MAX_UNAVAILABLE = 1
POLICY = {"canary": False, "waves_percent": [100], "bake_s": 0.0, "min_healthy_s": 2.0, "max_failed_cells": 9}
UNTIL_S = 300.0
FOUGHT_OVER = (
    ("DrainCell", "1 cells of the deployment are down on purpose"),
    ("ReplaceNode", "1 of 1 replacements of its pool"),
    ("StartCell", "cell sim-70b-"),
)
"""Conflicts that must occur, or the run would prove nothing."""


def fleet() -> None:
    """Five ready cells of two machines each, and three spares, in racks of four."""
    rows.deployment(cells=CELLS)
    rows.version("2", state=VersionState.RELEASED)
    machines = [
        rows.node(f"n-{number:02d}", topology=["zone", REGION, f"rack-{number // 4}"])
        for number in range(2 * CELLS + SPARES)
    ]
    for number in range(CELLS):
        since = NOW - timedelta(hours=2, minutes=-number)
        cell = f"sim-70b-{REGION}-{number + 1}"
        rows.cell(cell, *machines[2 * number : 2 * number + 2], created_at=since, state_since=since)
    Deployment.objects.update(next_ordinal=CELLS + 1, update_policy=POLICY)
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=36000, now=NOW - timedelta(minutes=10))


def roll_out() -> None:
    proposal = rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={})
    rollout_start(proposal=proposal, actor="ada", now=NOW)


def scale_up(world: World) -> None:
    deployment_scale(name="sim-70b", cells={REGION: CELLS + 1}, actor="ada", now=world.queue.now)


def report_faults(world: World, *nodes: str) -> None:
    """These machines report hardware faults."""
    for node in nodes:
        world.context.note("fault", node, "its accelerator is broken")
        fault_record(
            node=node,
            signature=FaultSignature.NEURON_HBM_UNCORRECTABLE,
            summary="uncorrectable",
            evidence={},
            now=world.queue.now,
        )


def two_machines_end(world: World) -> None:
    """Of two cells, so that both request a spare at the same time."""
    ready = (cell for cell in world.store.cells.values() if cell.state is CellState.READY)
    for cell in sorted(ready, key=lambda cell: cell.id)[-2:]:
        world.context.note("fault", cell.members[1].node, "the machine loses power")
        world.provider.machines[cell.members[1].node].power_off(silently=False)


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, TwoReconcilers]]:
    fleet()
    behaviours = {f"sim-70b@{number}": VersionBehaviour(load_s=4.0) for number in "12"}
    world, both = raced_world(monkeypatch, seed=4, behaviours=behaviours)
    both.pace = Pace(every_s=3.0, quiet_s=5.0, wake_up_s=1.0)
    yield world, both
    close(both)


def run_until_well(world: World) -> list[str]:
    """Invariants broken on the way, checked at every pass in the database and the world."""
    found: list[str] = []
    check = world.reconciler.on_pass

    def look() -> None:
        check()
        found.extend(broken_rows(MAX_UNAVAILABLE))

    world.reconciler.on_pass = look
    while world.queue.now_s < UNTIL_S and not (world.queue.now_s > 65.0 and world.is_settled()):
        world.run_until(world.queue.now_s + 5.0)
    world.check()
    return [*dict.fromkeys(found), *(f"{entry.subject}: {entry.text}" for entry in world.timeline.violations)]


@pytest.mark.long
def test_two_reconcilers_race_through_a_rollout_under_faults_and_break_nothing(
    raced: tuple[World, TwoReconcilers],
) -> None:
    world, both = raced
    world.queue.at(1.0, roll_out)
    world.queue.at(8.0, lambda: report_faults(world, "n-02", "n-07"))
    world.queue.at(15.0, lambda: engine_crashes(world))
    world.queue.at(22.0, lambda: machine_dies(world))
    world.queue.at(30.0, lambda: scale_up(world))
    world.queue.at(38.0, lambda: report_faults(world, "n-00", "n-01"))
    world.queue.at(55.0, lambda: two_machines_end(world))

    assert run_until_well(world) == []
    assert [*all_well(world), *mixed_versions(world)] == []
    assert Rollout.objects.get().state == "succeeded"
    assert DeploymentRegion.objects.get().cells == CELLS + 1
    for kind, why in FOUGHT_OVER:
        assert any(refusal.startswith(kind) and why in refusal for refusal in both.refused), (
            f"{kind} {why}: {both.refused}"
        )
