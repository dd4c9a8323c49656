"""No rollout: machines, agents, engines, connections and control plane processes die at random. Every wanted
cell comes back."""

from simulator.fault_injection import random_faults
from simulator.final_checks import all_well
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.network import UNRULY
from simulator.operator_actions import scale
from simulator.reconciler import ProcessFaults
from simulator.scenario import Scenario
from simulator.world import World


def play(world: World) -> None:
    random_faults(world, 12, 10.0, 600.0)
    world.queue.at(200.0, lambda: scale(world, "llama", "east", world.random.randint(2, 6)))
    world.queue.at(400.0, lambda: scale(world, "llama", "west", world.random.randint(0, 4)))


SCENARIOS = {
    "faults_everywhere": Scenario(
        about="Twelve random faults, lost and repeated messages, reconcilers killed between writes, and two scalings.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}), DeploymentSpec("tiny", {"east": 3}, size=1))),
        play=play,
        until_s=1800.0,
        busy_s=800.0,
        expect=all_well,
        quality=UNRULY,
        process_faults=ProcessFaults(killed=0.02, stalled=0.02),
    )
}
