"""Orders come twice, late and in the wrong order: no engine starts twice in a generation, none of a lower one."""

from simulator.fault_injection import engine_crashes
from simulator.final_checks import all_well
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.network import NetworkQuality
from simulator.operator_actions import scale
from simulator.scenario import Scenario
from simulator.world import World


def play(world: World) -> None:
    for at_s in range(20, 400, 40):
        world.queue.at(at_s, lambda: engine_crashes(world))
    world.queue.at(100.0, lambda: scale(world, "llama", "east", 5))
    world.queue.at(250.0, lambda: scale(world, "llama", "east", 3))


SCENARIOS = {
    "told_to_start_twice": Scenario(
        about="Half of all messages come twice, a tenth of them seconds late.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4}),)),
        play=play,
        until_s=900.0,
        expect=all_well,
        quality=NetworkQuality(latency_s=0.2, slow_s=10.0, loss=0.02, duplicates=0.5),
    )
}
