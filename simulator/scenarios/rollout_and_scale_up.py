"""A rollout and a scale-up at once, then a scale-down: the numbers are right in the end, and one ledger held."""

from collections.abc import Iterator

from fleet.planning.policy import UpdatePolicy
from simulator.final_checks import all_well, mixed_versions
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.operator_actions import roll_out, scale
from simulator.scenario import Scenario
from simulator.world import World

POLICY = UpdatePolicy(canary_bake_s=20.0, bake_s=20.0, min_healthy_s=10.0)


def play(world: World) -> None:
    begin_s = 20.0
    world.queue.at(begin_s, lambda: roll_out(world, "llama", "v2"))
    up_s = begin_s + world.random.uniform(0.0, 300.0)
    world.queue.at(up_s, lambda: scale(world, "llama", "east", world.random.randint(5, 8)))
    down_s = up_s + world.random.uniform(10.0, 300.0)
    world.queue.at(down_s, lambda: scale(world, "llama", "west", world.random.randint(1, 3)))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if not world.timeline.counts["rollout.succeeded"]:
        yield "the rollout did not succeed"


SCENARIOS = {
    "rollout_and_scale_up": Scenario(
        about="The cells wanted change twice while a rollout is under way.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=POLICY),)),
        play=play,
        until_s=3600.0,
        busy_s=700.0,
        expect=expect,
    )
}
