"""A region of 2,500 cells gets a new version: at most the budget is down, and the time is compared with what it must
take at least."""

from collections.abc import Iterator

from fleet.planning.policy import UpdatePolicy
from fleet.planning.rollout.waves import stages_of
from simulator.final_checks import all_well, mixed_versions
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.operator_actions import roll_out
from simulator.reconciler import Pace
from simulator.scenario import Scenario
from simulator.version_behaviour import VersionBehaviour
from simulator.world import World

CELLS = 2500
BUDGET = 125
LOAD_S = 120.0
POLICY = UpdatePolicy(max_unavailable=BUDGET, canary_bake_s=300.0, bake_s=300.0, min_healthy_s=60.0)
BEGIN_S = 60.0


def least_s() -> float:
    """What the policy alone asks for: each stage moves its cells in turns of the budget, of which each loads and must
    stay healthy; then it bakes. Nothing is faster with this policy, whoever runs it."""
    total, moved = 0.0, 0
    for stage in stages_of(POLICY, ("east",)):
        target = stage.target(CELLS)
        turns = -(-(target - moved) // BUDGET)
        bake_s = POLICY.canary_bake_s if stage.percent is None else POLICY.bake_s
        total += turns * (LOAD_S + POLICY.min_healthy_s) + bake_s
        moved = target
    return total


def play(world: World) -> None:
    world.queue.at(BEGIN_S, lambda: roll_out(world, "llama", "v2"))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    ends = [entry.at_s for entry in world.timeline.entries if entry.kind == "rollout.succeeded"]
    if not ends:
        yield "the rollout did not succeed"
        return
    lowest = min(world.series["llama", "east"].ready)
    took_s = ends[0] - BEGIN_S
    ratio = took_s / least_s()
    world.context.note(
        "measured", "llama", f"{took_s:.0f} s, {ratio:.2f} times the least; {lowest} cells served at least"
    )
    if lowest < CELLS - BUDGET:
        yield f"only {lowest} cells served"


SCENARIOS = {
    "region_2500_rollout": Scenario(
        about="2,500 cells of one node, at most 125 down, no faults.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": CELLS}, size=1, policy=POLICY, ready_timeout_s=600.0),)),
        play=play,
        until_s=12 * 3600.0,
        busy_s=1000.0,
        expect=expect,
        behaviours={version: VersionBehaviour(load_s=LOAD_S, load_spread=0.1) for version in ("v1", "v2")},
        skip_repeats=True,
        pace=Pace(every_s=15.0, quiet_s=60.0, wake_up_s=2.0),
    )
}
