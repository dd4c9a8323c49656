"""Machines are a pool that is too small for all. What is more urgent gets cells that others give up one by one, while
machines die; later it needs fewer, and what was taken comes back after it was kept for a while."""

from collections.abc import Iterator

from engine_agent.protocol.states import ServingClass
from fleet.planning.claims import SharingPolicy
from fleet.planning.policy import UpdatePolicy
from simulator.fault_injection import random_faults
from simulator.final_checks import all_well
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.network import UNRULY
from simulator.operator_actions import scale
from simulator.reconciler import ProcessFaults
from simulator.scenario import Scenario
from simulator.version_behaviour import VersionBehaviour
from simulator.world import World

RUSH_S, CALM_S = 200.0, 1500.0
POLICY = UpdatePolicy(min_healthy_s=10.0)
CHAT = SharingPolicy().of_class(ServingClass.REALTIME)
DOCS = SharingPolicy().of_class(ServingClass.NEAR_REALTIME)
NIGHT = SharingPolicy().of_class(ServingClass.BATCH)
DEPLOYMENTS = (
    DeploymentSpec("chat", {"east": 3}, size=1, policy=POLICY, floor=7, sharing=CHAT),
    DeploymentSpec("docs", {"east": 4}, size=1, policy=POLICY, floor=2, sharing=DOCS),
    DeploymentSpec("night", {"east": 2}, size=2, policy=POLICY, floor=1, sharing=NIGHT),
)


def play(world: World) -> None:
    random_faults(world, 8, 20.0, CALM_S)
    world.queue.at(RUSH_S, lambda: scale(world, "chat", "east", 7))
    world.queue.at(CALM_S, lambda: scale(world, "chat", "east", 3))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    taken, back = world.timeline.counts["grant.priority"], world.timeline.counts["grant.return"]
    if not taken or not back:
        yield f"{taken} grants took cells and {back} gave some back; both must have happened"
    for spec in world.store.deployments.values():
        for region, claim in spec.claims.items():
            if claim.granted is not None:
                yield f"{spec.name} in {region} still has {claim.granted} of {claim.asked}: {claim.reason}"


SCENARIOS = {
    "machines_short": Scenario(
        about="A pool too small for all: an urgent deployment grows, others make room, and get it back; eight faults.",
        fleet=FleetSpec(DEPLOYMENTS, spares=0, pool=0),
        play=play,
        until_s=6000.0,
        busy_s=CALM_S + 1500.0,
        expect=expect,
        behaviours={"v1": VersionBehaviour(load_s=20.0)},
        quality=UNRULY,
        process_faults=ProcessFaults(killed=0.01, stalled=0.01),
    )
}
