"""A simulated fleet with a deployment on two instance types: the reconciler's planners decide which cell is where."""

from collections import Counter
from dataclasses import replace

import pytest

from fleet.reconcile.planning.snapshot import VersionView
from fleet.reconcile.planning.states import CellState
from simulator.fault_injection import roll_out, scale
from simulator.fleet_spec import KIND, DeploymentSpec, FleetSpec, build_fleet
from simulator.invariants import INVARIANTS
from simulator.world import World

BIG = "simulated.16xl"
PLACE = ("llm", "east")
CELLS = 3


def world_of(prices: dict[str, float] | None = None) -> World:
    """Three cells of one machine on the first type, and three idle machines of the other, in a fixed pool."""
    fleet = build_fleet(FleetSpec((DeploymentSpec("llm", {"east": CELLS}, size=1),), spares=CELLS, pool=0))
    members = {member.node for cell in fleet.cells.values() for member in cell.members}
    nodes = {name: node if name in members else replace(node, instance_type=BIG) for name, node in fleet.nodes.items()}
    spec = replace(
        fleet.deployments["llm"],
        concurrency=8,
        further={BIG: {"v1": VersionView(1, 120.0, "sim", concurrency=16)}},
    )
    region = replace(fleet.regions["east"], spares={}, prices=prices or {})
    return World(
        replace(fleet, nodes=nodes, regions={"east": region}, deployments={"llm": spec}), invariants=INVARIANTS
    )


def types(world: World) -> Counter[str]:
    return Counter(cell.instance_type for cell in world.store.cells.values() if cell.state is CellState.READY)


@pytest.mark.parametrize("lost", [1, 2])
def test_cells_of_machines_that_are_gone_go_on_with_another_type(lost: int) -> None:
    world = world_of()
    world.run_until(5.0)
    for machine in list(world.provider.machines.values())[:lost]:
        machine.power_off(silently=False)
    world.run_until(600.0)
    assert types(world) == {KIND: CELLS - lost, BIG: lost}


@pytest.mark.slow
def test_another_mix_is_reached_without_a_cell_fewer_and_stays() -> None:
    world = world_of()
    world.run_until(5.0)
    spec = world.store.deployments["llm"]
    world.store.deployments["llm"] = spec.claiming("east", replace(spec.claim("east"), by_type={BIG: 2}))
    world.reconciler.wake()
    world.run_until(900.0)
    assert types(world) == {KIND: CELLS - 2, BIG: 2}
    assert min(world.series[PLACE].ready) == CELLS
    made = len(world.store.cells)
    world.run_until(1800.0)
    assert len(world.store.cells) == made, "no cell goes to and fro"


@pytest.mark.slow
def test_cells_move_to_a_cheaper_type_that_is_idle_and_no_further() -> None:
    world = world_of({KIND: 8.0, BIG: 12.0})  # a dollar per concurrent request, and three quarters of one
    world.run_until(1500.0)
    assert types(world) == {BIG: CELLS}
    assert min(world.series[PLACE].ready) == CELLS


@pytest.mark.slow
def test_a_rollout_moves_each_cell_on_its_own_machine_and_is_over() -> None:
    world = world_of()
    world.run_until(5.0)
    scale(world, *PLACE, CELLS + 1)
    world.run_until(300.0)
    assert types(world) == {KIND: CELLS, BIG: 1}
    roll_out(world, "llm", "v2")
    world.run_until(4000.0)
    assert {cell.version for cell in world.store.cells.values() if cell.state is CellState.READY} == {"v2"}
    assert types(world) == {KIND: CELLS, BIG: 1}
