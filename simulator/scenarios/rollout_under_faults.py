"""A rollout over two regions while machines, agents, engines, connections and control plane processes die: it
ends, and every cell runs the new version or every cell the old one."""

from collections.abc import Iterator

from fleet.planning.policy import UpdatePolicy
from fleet.planning.states import RolloutState
from simulator.fault_injection import random_faults
from simulator.final_checks import all_well, mixed_versions
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.network import UNRULY
from simulator.operator_actions import resume_paused, roll_out
from simulator.reconciler import ProcessFaults
from simulator.scenario import Scenario
from simulator.world import World

POLICY = UpdatePolicy(canary_bake_s=30.0, bake_s=30.0, min_healthy_s=10.0)


def play(world: World) -> None:
    world.queue.at(20.0, lambda: roll_out(world, "llama", "v2"))
    random_faults(world, 8, 10.0, 500.0)
    resume_paused(world, every_s=120.0)


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if rollout := world.store.rollouts.get("llama"):
        yield f"the rollout is still {rollout.state}: {rollout.reason}"
    ends = {f"rollout.{state}" for state in (RolloutState.SUCCEEDED, RolloutState.ROLLED_BACK)}
    if not any(entry.kind in ends for entry in world.timeline.entries):
        yield "the rollout came to no end"


SCENARIOS = {
    "rollout_under_faults": Scenario(
        about="A rollout with eight random faults, an unruly network, and reconcilers killed between writes.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=POLICY),)),
        play=play,
        until_s=3600.0,
        busy_s=700.0,
        expect=expect,
        quality=UNRULY,
        process_faults=ProcessFaults(killed=0.01, stalled=0.01),
    )
}
