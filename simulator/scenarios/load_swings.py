"""A load that swings, cells that follow it, and machines that die meanwhile: users lose little, cells come and go with
the load and no oftener, and in the end there are as many as it takes."""

import math
from collections.abc import Iterator

from fleet.planning.autoscaling.policy import CellRange, ScalingMode, ScalingPolicy
from simulator.fault_injection import random_faults
from simulator.final_checks import all_well
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.load_replay import LOST_MINUTE, LoadReplay, PolicyScaler, Serving
from simulator.scenario import Scenario
from simulator.version_behaviour import VersionBehaviour
from simulator.world import World

PLACE = ("llama", "east")
SWING_S = 2400.0
BUSY_S = 2 * SWING_S
FAULTS = 6
SERVING = Serving(per_cell=10.0, service_s=5.0)
RANGE = CellRange(2, 12)
POLICY = ScalingPolicy(ScalingMode.ACT, down_after_s=300.0)
AT_REST = 2
"""Cells that the last of the load takes: 10 requests at once at 70 % of 10 each."""
LOST_MOST = 3 * FAULTS
"""Minutes: each fault takes one of a few cells for about a minute, and may hit what heals another."""


def rate(second: float) -> float:
    """Requests a second: from 2 to 10 and back, twice; then 2."""
    return 6.0 - 4.0 * math.cos(2 * math.pi * min(second, BUSY_S) / SWING_S)


def play(world: World) -> None:
    random_faults(world, FAULTS, 300.0, BUSY_S - 300.0)
    LoadReplay(world, PLACE, rate, PolicyScaler(POLICY, SERVING.per_cell, 60.0), serving=SERVING, cells=RANGE)


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    wanted = world.store.deployments[PLACE[0]].cells_wanted[PLACE[1]]
    if wanted != AT_REST:
        yield f"{wanted} cells are wanted in the end, and {AT_REST} would do"
    if (lost := world.timeline.counts[LOST_MINUTE]) > LOST_MOST:
        yield f"users lost {lost} minutes; {LOST_MOST} are what the faults may cost"


SCENARIOS = {
    "load_swings": Scenario(
        about="A load that swings between 10 and 50 requests at once twice, cells that follow it, and six faults.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 2}),)),
        play=play,
        until_s=2 * BUSY_S,
        busy_s=BUSY_S + 3 * POLICY.down_after_s,
        expect=expect,
        behaviours={"v1": VersionBehaviour(load_s=40.0)},
    )
}
