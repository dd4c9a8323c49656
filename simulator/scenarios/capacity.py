"""Scenarios of capacity: too few machines, changing load, maintenance notices, a day of 10,000 nodes."""

import math
from collections.abc import Callable, Iterator
from functools import partial

from engine_agent.protocol.states import ServingClass
from fleet.autoscaling.planning.policy import CellRange, ScalingMode, ScalingPolicy
from fleet.deployments.planner import SharingPolicy, UpdatePolicy
from fleet.reconcile.planning.states import NoticeKind
from simulator.context import UNRULY, VersionBehaviour
from simulator.fault_injection import FAULTS, announce, random_faults, resume_paused, roll_out, scale
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.invariants import all_well, mixed_versions, never_touched
from simulator.load_replay import LOST_MINUTE, LoadReplay, PolicyScaler, Serving
from simulator.reconciler import Pace, ProcessFaults
from simulator.scenario import Scenario
from simulator.world import World

# The pool is too small for all deployments. The urgent one gets cells that others release one by one while machines
# fail. Later it needs fewer, and the others get their cells back.
SHORT_RUSH_S, SHORT_CALM_S = 200.0, 1500.0
SHORT_POLICY = UpdatePolicy(min_healthy_s=10.0)
SHORT_CHAT = SharingPolicy().of_class(ServingClass.REALTIME)
SHORT_DOCS = SharingPolicy().of_class(ServingClass.NEAR_REALTIME)
SHORT_NIGHT = SharingPolicy().of_class(ServingClass.BATCH)
SHORT_DEPLOYMENTS = (
    DeploymentSpec("chat", {"east": 3}, size=1, policy=SHORT_POLICY, floor=7, sharing=SHORT_CHAT),
    DeploymentSpec("docs", {"east": 4}, size=1, policy=SHORT_POLICY, floor=2, sharing=SHORT_DOCS),
    DeploymentSpec("night", {"east": 2}, size=2, policy=SHORT_POLICY, floor=1, sharing=SHORT_NIGHT),
)


def _short_play(world: World) -> None:
    random_faults(world, 8, 20.0, SHORT_CALM_S)
    world.queue.at(SHORT_RUSH_S, lambda: scale(world, "chat", "east", 7))
    world.queue.at(SHORT_CALM_S, lambda: scale(world, "chat", "east", 3))


def _short_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    taken, back = world.timeline.counts["grant.priority"], world.timeline.counts["grant.return"]
    if not taken or not back:
        yield f"{taken} grants took cells and {back} returned some; both must happen"
    for spec in world.store.deployments.values():
        for region, claim in spec.claims.items():
            if claim.granted is not None:
                yield f"{spec.name} in {region} still has {claim.granted} of {claim.asked}: {claim.reason}"


# The number of cells follows a load that swings while machines fail. Users lose little, and the number of cells is
# right at the end.
SWINGS_PLACE = ("llama", "east")
SWINGS_SWING_S = 2400.0
SWINGS_BUSY_S = 2 * SWINGS_SWING_S
SWINGS_FAULTS = 6
SWINGS_SERVING = Serving(per_cell=10.0, service_s=5.0)
SWINGS_RANGE = CellRange(2, 12)
SWINGS_POLICY = ScalingPolicy(ScalingMode.ACT, down_after_s=300.0)
SWINGS_AT_REST = 2
"""Cells that the last of the load takes: 10 concurrent requests at 70 % of 10 each."""
SWINGS_LOST_MOST = 3 * SWINGS_FAULTS
"""Minutes: each fault takes one of a few cells for about a minute, and may hit what heals another."""


def rate(second: float) -> float:
    """Requests a second: from 2 to 10 and back, twice; then 2."""
    return 6.0 - 4.0 * math.cos(2 * math.pi * min(second, SWINGS_BUSY_S) / SWINGS_SWING_S)


def _swings_play(world: World) -> None:
    random_faults(world, SWINGS_FAULTS, 300.0, SWINGS_BUSY_S - 300.0)
    LoadReplay(
        world,
        SWINGS_PLACE,
        rate,
        PolicyScaler(SWINGS_POLICY, SWINGS_SERVING.per_cell, 60.0),
        serving=SWINGS_SERVING,
        cells=SWINGS_RANGE,
    )


def _swings_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    wanted = world.store.deployments[SWINGS_PLACE[0]].cells_wanted[SWINGS_PLACE[1]]
    if wanted != SWINGS_AT_REST:
        yield f"{wanted} cells are wanted at the end instead of {SWINGS_AT_REST}"
    if (lost := world.timeline.counts[LOST_MINUTE]) > SWINGS_LOST_MOST:
        yield f"users lost {lost} minutes; the faults may cost {SWINGS_LOST_MOST}"


# Providers announce the end of machines: cells on them are drained before, and other machines replace them.
SPOT_AT_S = 30.0
SPOT_S = 120.0
"""EC2's warning before it takes a spot machine back."""
SPOT_BLOCK_S = 2400.0
SPOT_POLICY = UpdatePolicy(min_healthy_s=10.0)


def _spot_play(world: World, cells: int, ranks: tuple[int, ...], kind: NoticeKind, lead_s: float) -> None:
    chosen = sorted(world.store.cells)[:cells]
    nodes = [m.node for cell in chosen for m in world.store.cells[cell].members if m.rank in ranks]
    world.queue.at(SPOT_AT_S, lambda: announce(world, nodes, kind, lead_s))


def _spot_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(world, ("node.lost", "cell.failed"))
    announced = {notice.node for notice in world.store.notices}
    yield from (f"{node} is still there" for node in sorted(announced & set(world.store.nodes)))


def _spot_scenario(
    about: str, spares: int, happens: Callable[[World], None], busy_s: float = 300.0, *, cells: int = 4
) -> Scenario:
    return Scenario(
        about=about,
        fleet=FleetSpec((DeploymentSpec("llama", {"east": cells}, policy=SPOT_POLICY),), spares=spares),
        play=happens,
        until_s=3000.0,
        busy_s=busy_s,
        expect=expect_service if cells == 1 else _spot_expect,
    )


def expect_service(world: World) -> Iterator[str]:
    """Of a lone cell: another one was ready before it was drained."""
    yield from _spot_expect(world)
    kinds = [entry.kind for entry in world.timeline.entries if entry.kind in {"cell.ready", "cell.draining"}]
    if kinds != ["cell.ready", "cell.draining"]:
        yield f"the second cell must get ready before the first drains; it was {', '.join(kinds)}"


def _spot(cells: int, rank: int) -> Callable[[World], None]:
    return partial(_spot_play, cells=cells, ranks=(rank,), kind=NoticeKind.INTERRUPTION, lead_s=SPOT_S)


# A day of 10,000 nodes in four regions with the faults of a day and one rollout.
DAY_S = 86400.0
DAY_FAULTS_A_DAY = 60
"""Meta's report on Llama 3 counts 466 interruptions of 2,000 hosts in 54 days: 8.6 a day, 43 for 10,000."""
DAY_POLICY = UpdatePolicy(max_unavailable=20, canary_bake_s=300.0, bake_s=300.0, min_healthy_s=60.0)
DAY_REGIONS = ("east", "north", "south", "west")


def fleet_spec() -> FleetSpec:
    """20 deployments of 31 cells of 4 nodes in each of 4 regions, and 20 spares per region."""
    cells = dict.fromkeys(DAY_REGIONS, 31)
    specs = (
        DeploymentSpec(f"model-{number:02d}", cells, size=4, policy=DAY_POLICY, ready_timeout_s=600.0)
        for number in range(20)
    )
    return FleetSpec(tuple(specs), spares=20)


def _day_play(world: World) -> None:
    for _ in range(DAY_FAULTS_A_DAY):
        fault = world.random.choice(FAULTS)
        world.queue.at(world.random.uniform(0.0, DAY_S * 0.95), lambda fault=fault: fault(world))  # type: ignore[misc]
    world.queue.at(3600.0, lambda: roll_out(world, "model-03", "v2"))
    resume_paused(world, every_s=900.0)


def _day_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if not world.timeline.counts["rollout.succeeded"]:
        yield "the rollout did not succeed"


SCENARIOS = {
    "machines_short": Scenario(
        about="The pool is too small: an urgent deployment grows, others shrink and recover; eight faults.",
        fleet=FleetSpec(SHORT_DEPLOYMENTS, spares=0, pool=0),
        play=_short_play,
        until_s=6000.0,
        busy_s=SHORT_CALM_S + 1500.0,
        expect=_short_expect,
        behaviours={"v1": VersionBehaviour(load_s=20.0)},
        quality=UNRULY,
        process_faults=ProcessFaults(killed=0.01, stalled=0.01),
    ),
    "load_swings": Scenario(
        about="A load that swings between 10 and 50 concurrent requests twice, cells that follow it, and six faults.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 2}),)),
        play=_swings_play,
        until_s=2 * SWINGS_BUSY_S,
        busy_s=SWINGS_BUSY_S + 3 * SWINGS_POLICY.down_after_s,
        expect=_swings_expect,
        skip_repeats=True,
        behaviours={"v1": VersionBehaviour(load_s=40.0)},
    ),
    "spot_warning": _spot_scenario("A leader is taken back in two minutes; spares are there.", 2, _spot(1, 0)),
    "spot_warning_without_spare": _spot_scenario(
        "A follower is taken back in two minutes, and another machine must be bought.", 0, _spot(1, 1)
    ),
    "spot_warning_lone_cell": _spot_scenario(
        "The leader of the only cell is taken back in two minutes; spares make another one.", 2, _spot(1, 0), cells=1
    ),
    "lone_cell_retires": _spot_scenario(
        "A machine of the only cell is taken in 40 minutes; machines for another one are bought.",
        0,
        partial(_spot_play, cells=1, ranks=(0,), kind=NoticeKind.RETIREMENT, lead_s=SPOT_BLOCK_S),
        busy_s=2700.0,
        cells=1,
    ),
    "spot_warning_everywhere": _spot_scenario(
        "A machine of each cell is taken back in two minutes: more than the budget allows.", 1, _spot(4, 0)
    ),
    "block_ends": _spot_scenario(
        "All machines of two cells end in 40 minutes; other machines are ready before.",
        0,
        partial(_spot_play, cells=2, ranks=(0, 1), kind=NoticeKind.BLOCK_END, lead_s=SPOT_BLOCK_S),
        busy_s=2700.0,
    ),
    "day_10000_nodes": Scenario(
        about="10,000 nodes, 2,480 cells, 60 faults and a rollout in a day.",
        fleet=fleet_spec(),
        play=_day_play,
        until_s=DAY_S,
        expect=_day_expect,
        behaviours={version: VersionBehaviour(load_s=120.0) for version in ("v1", "v2")},
        skip_repeats=True,
        pace=Pace(every_s=15.0, quiet_s=60.0, wake_up_s=2.0),
    ),
}
