"""Every agent falls silent at once: the control plane is cut off. It may take no action, and they go on
serving."""

from collections.abc import Iterator

from simulator.fault_injection import silence
from simulator.final_checks import all_well, never_touched
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.scenario import Scenario
from simulator.world import World

SILENT_S = 300.0


def play(world: World) -> None:
    world.queue.at(30.0, lambda: silence(world, world.provider.machines.values(), SILENT_S))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(
        world, ("cell.failed", "cell.lost", "cell.starting", "cell.draining", "node.lost", "node.suspect")
    )
    if world.provider.launched:
        yield f"{world.provider.launched} machines were launched"


SCENARIOS = {
    "all_silent": Scenario(
        about="All agents are silent for five minutes.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 3}),)),
        play=play,
        until_s=600.0,
        expect=expect,
    )
}
