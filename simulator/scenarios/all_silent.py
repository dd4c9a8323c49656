"""Every agent falls silent at once: we are deaf, not they dead. Nothing may be done, and they go on serving."""

from collections.abc import Iterator

from simulator.happenings import all_well, never_touched, silence
from simulator.scenario import Scenario
from simulator.shape import DeploymentShape, FleetShape
from simulator.world import World

SILENT_S = 300.0


def play(world: World) -> None:
    world.queue.at(30.0, lambda: silence(world, world.machines.all.values(), SILENT_S))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(
        world, ("cell.failed", "cell.lost", "cell.starting", "cell.draining", "node.lost", "node.suspect")
    )
    if world.machines.booted:
        yield f"{world.machines.booted} machines were launched"


SCENARIO = Scenario(
    about="All agents are silent for five minutes.",
    shape=FleetShape((DeploymentShape("llama", {"east": 4, "west": 3}),)),
    play=play,
    until_s=600.0,
    expect=expect,
)
