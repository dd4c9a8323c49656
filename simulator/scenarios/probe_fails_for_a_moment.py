"""Every leader fails its probes for a few seconds, once. One failed probe is no fault: nothing may be done about it."""

from collections.abc import Iterator

from simulator.fault_injection import probe_fails
from simulator.final_checks import all_well, never_touched
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.scenario import Scenario
from simulator.world import World

UNTIL_S = 300.0


def play(world: World) -> None:
    for cell in sorted(world.store.cells):
        at_s, for_s = world.random.uniform(20.0, 200.0), world.random.uniform(0.5, 6.0)
        world.queue.at(at_s, lambda cell=cell, for_s=for_s: probe_fails(world, cell, for_s))  # type: ignore[misc]


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    kinds = ("cell.failed", "cell.lost", "cell.starting", "cell.draining", "node.suspect", "node.lost", "node.faulty")
    yield from never_touched(world, kinds)
    if world.timeline.counts["fault"] != len(world.store.cells):
        yield "not every cell had its bad moment"


SCENARIOS = {
    "probe_fails_for_a_moment": Scenario(
        about="Each leader answers no probe for up to six seconds.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}),)),
        play=play,
        until_s=UNTIL_S,
        expect=expect,
    )
}
