"""Nodes fall silent until they are suspect and come back, while a stalled reconciler still holds what it had decided.
What was decided of a node that came back must not be done to it."""

from collections.abc import Iterator

from simulator.fault_injection import network_cut
from simulator.final_checks import all_well, never_touched
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.network import UNRULY
from simulator.reconciler import ProcessFaults
from simulator.scenario import Scenario
from simulator.world import World


def play(world: World) -> None:
    for at_s in range(20, 600, 30):
        world.queue.at(at_s, lambda: network_cut(world, world.random.uniform(9.0, 28.0)))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(world, ("node.lost", "cell.lost"))


SCENARIOS = {
    "stale_verdicts": Scenario(
        about="Nodes come and go, and every tenth pass writes 20 s late what it decided.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}),)),
        play=play,
        until_s=900.0,
        expect=expect,
        quality=UNRULY,
        process_faults=ProcessFaults(stalled=0.1),
    )
}
