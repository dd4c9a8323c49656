"""Most of a zone falls silent and its provider sees nothing wrong: silence alone replaces nothing, and what serves goes
on serving."""

from collections.abc import Iterator

from simulator.fault_injection import silence
from simulator.final_checks import all_well, never_touched
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.scenario import Scenario
from simulator.world import World

SILENT_SHARE = 0.6


def play(world: World) -> None:
    zone = [machine for node, machine in sorted(world.provider.machines.items()) if world.region_of(node) == "east"]
    chosen = world.random.sample(zone, round(len(zone) * SILENT_SHARE))
    world.queue.at(30.0, lambda: silence(world, chosen, 240.0))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(world, ("cell.lost", "cell.failed", "cell.draining", "node.lost"))
    if world.provider.launched:
        yield f"{world.provider.launched} machines were launched"


SCENARIOS = {
    "zone_silent": Scenario(
        about="60 % of the machines of a region are silent for four minutes.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 10, "west": 3}),)),
        play=play,
        until_s=600.0,
        expect=expect,
    )
}
