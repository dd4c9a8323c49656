"""The invariants detect worlds that are broken on purpose."""

from dataclasses import replace

from fleet.deployments.planner import UpdatePolicy
from fleet.reconcile.planning.decisions import MoveCell, StopCell
from fleet.reconcile.planning.states import CellState
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.invariants import INVARIANTS
from simulator.world import World


def world_of_three() -> World:
    policy = UpdatePolicy(max_unavailable=1)
    return World(build_fleet(FleetSpec((DeploymentSpec("llama", {"east": 3}, policy=policy),))), invariants=INVARIANTS)


def broken(world: World) -> set[str]:
    return {entry.subject for entry in world.timeline.violations}


def drain(world: World, cell: str) -> None:
    world.store.apply(MoveCell(cell, CellState.READY, 1, CellState.DRAINING, "by mistake"), world.queue.now)


def test_a_quiet_world_breaks_nothing() -> None:
    world = world_of_three()
    world.run_until(30.0)
    world.check()

    assert broken(world) == set()


def test_two_cells_down_at_once_break_availability_and_the_ledger() -> None:
    world = world_of_three()
    for cell in list(world.store.cells)[:2]:
        drain(world, cell)

    assert {"I1", "I10"} <= broken(world)


def test_a_cell_stopped_with_requests_in_flight_is_seen() -> None:
    world = world_of_three()
    cell = next(iter(world.store.cells))
    drain(world, cell)
    world.store.apply(StopCell(cell, CellState.DRAINING, 1, "too early"), world.queue.now)

    assert "I3" in broken(world)


def test_ready_without_evidence_is_seen() -> None:
    world = world_of_three()
    cell = next(iter(world.store.cells.values()))
    world.store.cells[cell.id] = replace(cell, state=CellState.STARTING, generation=2)
    world.store.apply(MoveCell(cell.id, CellState.STARTING, 2, CellState.READY, "believed"), world.queue.now)

    assert "I6" in broken(world)


def test_a_mixed_cell_is_seen() -> None:
    world = world_of_three()
    world.run_until(1.0)
    cell = next(iter(world.store.cells.values()))
    world.store.cells[cell.id] = replace(cell, version="v9")
    world.check()

    assert "I2" in broken(world)


def test_a_node_in_two_cells_is_seen() -> None:
    world = world_of_three()
    one, other, _ = world.store.cells.values()
    world.store.cells[one.id] = replace(one, members=other.members)
    world.check()

    assert "I4" in broken(world)
