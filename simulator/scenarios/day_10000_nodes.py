"""A day of 10,000 nodes in four regions: what dies in a day dies, and one deployment gets a new version."""

from collections.abc import Iterator

from fleet.planning.policy import UpdatePolicy
from simulator.fault_injection import FAULTS
from simulator.final_checks import all_well, mixed_versions
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.operator_actions import resume_paused, roll_out
from simulator.reconciler import Pace
from simulator.scenario import Scenario
from simulator.version_behaviour import VersionBehaviour
from simulator.world import World

DAY_S = 86400.0
FAULTS_A_DAY = 60
"""Meta's report on Llama 3 counts 466 interruptions of 2,000 hosts in 54 days: 8.6 a day, 43 for 10,000."""
POLICY = UpdatePolicy(max_unavailable=20, canary_bake_s=300.0, bake_s=300.0, min_healthy_s=60.0)
REGIONS = ("east", "north", "south", "west")


def fleet_spec() -> FleetSpec:
    """20 deployments of 31 cells of 4 nodes in each of 4 regions, and 20 spares per region."""
    cells = dict.fromkeys(REGIONS, 31)
    specs = (
        DeploymentSpec(f"model-{number:02d}", cells, size=4, policy=POLICY, ready_timeout_s=600.0)
        for number in range(20)
    )
    return FleetSpec(tuple(specs), spares=20)


def play(world: World) -> None:
    for _ in range(FAULTS_A_DAY):
        fault = world.random.choice(FAULTS)
        world.queue.at(world.random.uniform(0.0, DAY_S * 0.95), lambda fault=fault: fault(world))  # type: ignore[misc]
    world.queue.at(3600.0, lambda: roll_out(world, "model-03", "v2"))
    resume_paused(world, every_s=900.0)


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if not world.timeline.counts["rollout.succeeded"]:
        yield "the rollout did not succeed"


SCENARIOS = {
    "day_10000_nodes": Scenario(
        about="10,000 nodes, 2,480 cells, 60 faults and a rollout in a day.",
        fleet=fleet_spec(),
        play=play,
        until_s=DAY_S,
        expect=expect,
        behaviours={version: VersionBehaviour(load_s=120.0) for version in ("v1", "v2")},
        skip_repeats=True,
        pace=Pace(every_s=15.0, quiet_s=60.0, wake_up_s=2.0),
    )
}
