"""Rollouts whose new version is bad in one way or another: one cell is touched, the others keep serving, and it is
rolled back."""

from collections.abc import Iterator

from fleet.planning.policy import UpdatePolicy
from simulator.final_checks import all_well, mixed_versions, never_touched, touched_cells
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.operator_actions import roll_out
from simulator.scenario import Scenario
from simulator.version_behaviour import VersionBehaviour
from simulator.world import World

POLICY = UpdatePolicy(canary_bake_s=60.0, bake_s=60.0, min_healthy_s=10.0)


def _rollout_to(about: str, behaviour: VersionBehaviour) -> Scenario:
    """Rolls `v2`, which behaves so, out over four and two cells."""
    return Scenario(
        about=about,
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 4, "west": 2}, policy=POLICY),)),
        play=_play,
        until_s=1800.0,
        busy_s=100.0,
        expect=_expect,
        behaviours={"v2": behaviour},
    )


def _play(world: World) -> None:
    world.queue.at(20.0, lambda: roll_out(world, "llama", "v2"))


def _expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from mixed_versions(world)
    yield from never_touched(world, ("rollout.succeeded",))
    if not world.timeline.counts["rollout.rolled_back"]:
        yield "the rollout was not rolled back"
    if len(touched := touched_cells(world)) > 1:
        yield f"{len(touched)} cells were touched: {', '.join(sorted(touched))}"


SCENARIOS = {
    "bad_version_answers_wrong": _rollout_to("v2 answers wrong.", VersionBehaviour(answers_wrong=True)),
    "bad_version_fails_after_ready": _rollout_to(
        "v2 fails 30 s after it became ready.", VersionBehaviour(fails_after_s=30.0)
    ),
    "bad_version_is_slower": _rollout_to("v2 is 1.5 times slower.", VersionBehaviour(slowness=1.5)),
    "bad_version_never_starts": _rollout_to("v2 never starts.", VersionBehaviour(never_starts=True)),
}
"""The slower one is caught by the gate after the canary, the others before."""
