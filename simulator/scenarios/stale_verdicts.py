"""Nodes fall silent until they are suspect and come back, while a stalled reconciler still holds what it had decided.
What was decided of a node that came back must not be done to it."""

from collections.abc import Iterator

from simulator.control import Mishaps
from simulator.happenings import all_well, line_cut, never_touched
from simulator.network import UNRULY
from simulator.scenario import Scenario
from simulator.shape import DeploymentShape, FleetShape
from simulator.world import World


def play(world: World) -> None:
    for at_s in range(20, 600, 30):
        world.queue.at(at_s, lambda: line_cut(world, world.random.uniform(9.0, 28.0)))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(world, ("node.lost", "cell.lost"))


SCENARIO = Scenario(
    about="Nodes come and go, and every tenth pass writes 20 s late what it decided.",
    shape=FleetShape((DeploymentShape("llama", {"east": 4, "west": 2}),)),
    play=play,
    until_s=900.0,
    expect=expect,
    quality=UNRULY,
    mishaps=Mishaps(stalled=0.1),
)
