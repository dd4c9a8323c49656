"""Scenarios of rollouts: with good and bad versions, with faults, without spares, in a large region."""

from collections.abc import Iterator
from functools import partial

from fleet.deployments.planner import UpdatePolicy
from fleet.reconcile.planning.states import RolloutState
from fleet.rollouts.planning.waves import stages_of
from simulator.context import UNRULY, NetworkQuality, VersionBehaviour
from simulator.fault_injection import engine_crashes, random_faults, resume_paused, roll_out, scale
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.invariants import all_well, mixed_versions, never_touched, touched_cells
from simulator.reconciler import Pace, ProcessFaults
from simulator.scenario import Scenario
from simulator.world import World

# Rollouts to a bad version: one cell changes, the others keep serving, and the rollout is rolled back. The gate after
# the canary catches the slower version. The other versions fail before it.
BAD_POLICY = UpdatePolicy(canary_bake_s=60.0, bake_s=60.0, min_healthy_s=10.0)


def _roll_out_at(at_s: float, world: World) -> None:
    world.queue.at(at_s, lambda: roll_out(world, "llama", "v2"))


def _rollout_to(about: str, behaviour: VersionBehaviour) -> Scenario:
    """Rolls `v2`, which behaves like `behaviour`, out to six cells."""
    return Scenario(
        about=about,
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=BAD_POLICY),)),
        play=partial(_roll_out_at, 20.0),
        until_s=1800.0,
        busy_s=100.0,
        expect=_bad_expect,
        behaviours={"v2": behaviour},
    )


def _bad_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    yield from never_touched(world, ("rollout.succeeded",))
    if not world.timeline.counts["rollout.rolled_back"]:
        yield "the rollout was not rolled back"
    if len(touched := touched_cells(world)) > 1:
        yield f"{len(touched)} cells were touched: {', '.join(sorted(touched))}"


# A rollout over two regions while machines, agents, engines, connections and control plane processes fail. It must end,
# with all cells on the new version or all on the old one.
UNDER_FAULTS_POLICY = UpdatePolicy(canary_bake_s=30.0, bake_s=30.0, min_healthy_s=10.0)


def _under_faults_play(world: World) -> None:
    world.queue.at(20.0, lambda: roll_out(world, "llama", "v2"))
    random_faults(world, 8, 10.0, 500.0)
    resume_paused(world, every_s=120.0)


def _under_faults_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if rollout := world.store.rollouts.get("llama"):
        yield f"the rollout is still {rollout.state}: {rollout.reason}"
    ends = {f"rollout.{state}" for state in (RolloutState.SUCCEEDED, RolloutState.ROLLED_BACK)}
    if not any(entry.kind in ends for entry in world.timeline.entries):
        yield "the rollout did not end"


# A rollout during a scale-up and a scale-down. The numbers of cells must be right at the end.
SCALE_UP_POLICY = UpdatePolicy(canary_bake_s=20.0, bake_s=20.0, min_healthy_s=10.0)


def _scale_up_play(world: World) -> None:
    begin_s = 20.0
    world.queue.at(begin_s, lambda: roll_out(world, "llama", "v2"))
    up_s = begin_s + world.random.uniform(0.0, 300.0)
    world.queue.at(up_s, lambda: scale(world, "llama", "east", world.random.randint(5, 8)))
    down_s = up_s + world.random.uniform(10.0, 300.0)
    world.queue.at(down_s, lambda: scale(world, "llama", "west", world.random.randint(1, 3)))


def _scale_up_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if not world.timeline.counts["rollout.succeeded"]:
        yield "the rollout did not succeed"


# A rollout without spare machines: every cell restarts on its nodes, and no machine is launched.
WITHOUT_SPARES_POLICY = UpdatePolicy(canary_bake_s=20.0, bake_s=20.0, min_healthy_s=10.0)


def _without_spares_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    if world.provider.launched:
        yield f"{world.provider.launched} machines were launched"
    if not world.timeline.counts["rollout.succeeded"]:
        yield "the rollout did not succeed"


# A rollout to 2,500 cells of a region within the budget, and the shortest duration that the policy allows.
REGION_CELLS = 2500
REGION_BUDGET = 125
REGION_LOAD_S = 120.0
REGION_POLICY = UpdatePolicy(max_unavailable=REGION_BUDGET, canary_bake_s=300.0, bake_s=300.0, min_healthy_s=60.0)
REGION_BEGIN_S = 60.0


def least_s() -> float:
    """Returns the shortest duration that the policy allows, in seconds: each stage moves its cells in turns of the
    budget, and each turn loads and stays healthy. Then the stage bakes."""
    total, moved = 0.0, 0
    for stage in stages_of(REGION_POLICY, ("east",)):
        target = stage.target(REGION_CELLS)
        turns = -(-(target - moved) // REGION_BUDGET)
        bake_s = REGION_POLICY.canary_bake_s if stage.percent is None else REGION_POLICY.bake_s
        total += turns * (REGION_LOAD_S + REGION_POLICY.min_healthy_s) + bake_s
        moved = target
    return total


def _region_expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    ends = [entry.at_s for entry in world.timeline.entries if entry.kind == "rollout.succeeded"]
    if not ends:
        yield "the rollout did not succeed"
        return
    lowest = min(world.series["llama", "east"].ready)
    took_s = ends[0] - REGION_BEGIN_S
    ratio = took_s / least_s()
    world.context.note(
        "measured", "llama", f"{took_s:.0f} s, {ratio:.2f} times the least; {lowest} cells served at least"
    )
    if lowest < REGION_CELLS - REGION_BUDGET:
        yield f"only {lowest} cells served"


# Orders arrive twice, late and out of order: no engine may start twice in a generation, and none in an older one.
def _twice_play(world: World) -> None:
    for at_s in range(20, 400, 40):
        world.queue.at(at_s, lambda: engine_crashes(world))
    world.queue.at(100.0, lambda: scale(world, "llama", "east", 5))
    world.queue.at(250.0, lambda: scale(world, "llama", "east", 3))


SCENARIOS = {
    "bad_version_answers_wrong": _rollout_to("v2 answers wrong.", VersionBehaviour(answers_wrong=True)),
    "bad_version_fails_after_ready": _rollout_to(
        "v2 fails 30 s after it became ready.", VersionBehaviour(fails_after_s=30.0)
    ),
    "bad_version_is_slower": _rollout_to("v2 is 1.5 times slower.", VersionBehaviour(slowness=1.5)),
    "bad_version_never_starts": _rollout_to("v2 never starts.", VersionBehaviour(never_starts=True)),
    "rollout_under_faults": Scenario(
        about="A rollout with eight random faults, an unruly network, and reconcilers killed between writes.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=UNDER_FAULTS_POLICY),)),
        play=_under_faults_play,
        until_s=3600.0,
        busy_s=700.0,
        expect=_under_faults_expect,
        quality=UNRULY,
        process_faults=ProcessFaults(killed=0.01, stalled=0.01),
    ),
    "rollout_and_scale_up": Scenario(
        about="The cells wanted change twice while a rollout is under way.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=SCALE_UP_POLICY),)),
        play=_scale_up_play,
        until_s=3600.0,
        busy_s=700.0,
        expect=_scale_up_expect,
    ),
    "rollout_without_spares": Scenario(
        about="Six cells, updated in place without spares.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=WITHOUT_SPARES_POLICY),), spares=0),
        play=partial(_roll_out_at, 10.0),
        until_s=3600.0,
        busy_s=100.0,
        expect=_without_spares_expect,
    ),
    "region_2500_rollout": Scenario(
        about="2,500 cells of one node, at most 125 down, no faults.",
        fleet=FleetSpec(
            (DeploymentSpec("llama", {"east": REGION_CELLS}, size=1, policy=REGION_POLICY, ready_timeout_s=600.0),)
        ),
        play=partial(_roll_out_at, REGION_BEGIN_S),
        until_s=12 * 3600.0,
        busy_s=1000.0,
        expect=_region_expect,
        behaviours={version: VersionBehaviour(load_s=REGION_LOAD_S, load_spread=0.1) for version in ("v1", "v2")},
        skip_repeats=True,
        pace=Pace(every_s=15.0, quiet_s=60.0, wake_up_s=2.0),
    ),
    "told_to_start_twice": Scenario(
        about="Half of all messages arrive twice, a tenth of them seconds late.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4}),)),
        play=_twice_play,
        until_s=900.0,
        expect=all_well,
        quality=NetworkQuality(latency_s=0.2, slow_s=10.0, loss=0.02, duplicates=0.5),
    ),
}
