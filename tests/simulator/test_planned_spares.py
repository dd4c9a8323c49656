"""Machines that the plan of the day keeps warm, in a simulated fleet: the reconciler's planner launches them."""

from dataclasses import replace

import pytest

from fleet.machines.planner import ProviderLimits
from fleet.reconcile.planning.snapshot import FleetView, PlannedPlaceCells
from fleet.reconcile.planning.states import NodeState
from simulator.clock import EPOCH
from simulator.context import VersionBehaviour
from simulator.fault_injection import scale
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.world import World

BOOT_S, LOAD_S = 90.0, 150.0
PLACE = ("llm", "east")


def world_of(*cells: int) -> World:
    """One cell of two machines, machines that boot, and a plan of cells by quarter of an hour."""
    fleet = build_fleet(FleetSpec((DeploymentSpec("llm", {"east": 1}, size=2, ready_timeout_s=600.0),), spares=0))
    limits = ProviderLimits(join_timeout_s=4 * BOOT_S, boot_s=BOOT_S)
    regions = {name: replace(region, limits=limits) for name, region in fleet.regions.items()}
    behaviours = {"v1": VersionBehaviour(load_s=LOAD_S, load_spread=0.0)}
    world = World(replace(fleet, regions=regions), behaviours=behaviours)
    world.provider.boot_s = BOOT_S
    planned = PlannedPlaceCells(*PLACE, EPOCH, 900, cells, BOOT_S + LOAD_S)

    def seen(view: FleetView) -> FleetView:
        return replace(view, planned=(planned,))

    world.reconciler.prepare = seen
    return world


def machines(world: World) -> int:
    return sum(node.state is not NodeState.RETIRED for node in world.store.nodes.values())


def ready_after(world: World, cells: int) -> float:
    """Seconds from the request until so many cells serve."""
    begins_s = world.queue.now_s
    scale(world, *PLACE, cells)
    while world.ready[PLACE] < cells:
        world.run_until(world.queue.now_s + 5.0)
        assert world.queue.now_s < begins_s + 600.0
    return world.queue.now_s - begins_s


def test_a_cell_that_was_planned_starts_without_a_boot() -> None:
    planned, alone = world_of(1, 2, 2), world_of(1, 1, 1)
    for world in (planned, alone):
        world.run_until(400.0)
    assert (machines(planned), machines(alone)) == (4, 2)
    with_plan, without = ready_after(planned, 2), ready_after(alone, 2)
    assert LOAD_S <= with_plan <= without - 0.8 * BOOT_S


@pytest.mark.slow
def test_machines_of_a_plan_that_is_too_old_are_given_back() -> None:
    world = world_of(1, 2, 2, 2)
    world.run_until(400.0)
    assert machines(world) == 4
    world.run_until(2700.0 + 400.0)
    assert machines(world) == 2
