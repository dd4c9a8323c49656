"""A rollout in place with no spare machine at all: every cell comes back on its own nodes, and none is bought."""

from collections.abc import Iterator

from fleet.planning.policy import UpdatePolicy
from simulator.final_checks import all_well, mixed_versions
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.operator_actions import roll_out
from simulator.scenario import Scenario
from simulator.world import World

POLICY = UpdatePolicy(canary_bake_s=20.0, bake_s=20.0, min_healthy_s=10.0)


def play(world: World) -> None:
    world.queue.at(10.0, lambda: roll_out(world, "llama", "v2"))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if world.provider.launched:
        yield f"{world.provider.launched} machines were launched"
    if not world.timeline.counts["rollout.succeeded"]:
        yield "the rollout did not succeed"


SCENARIOS = {
    "rollout_without_spares": Scenario(
        about="No spares, six cells in place.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=POLICY),), spares=0),
        play=play,
        until_s=3600.0,
        busy_s=100.0,
        expect=expect,
    )
}
