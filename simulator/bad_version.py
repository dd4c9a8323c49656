"""The story of a rollout whose new version is bad: one cell is touched, the others serve on, and it goes back."""

from collections.abc import Iterator

from fleet.planning.policy import UpdatePolicy
from simulator.behaviour import VersionBehaviour
from simulator.happenings import all_well, mixed_versions, never_touched, roll_out, touched_cells
from simulator.scenario import Scenario
from simulator.shape import DeploymentShape, FleetShape
from simulator.world import World

POLICY = UpdatePolicy(canary_bake_s=60.0, bake_s=60.0, min_healthy_s=10.0)


def bad_version(about: str, behaviour: VersionBehaviour) -> Scenario:
    """Rolls `v2`, which behaves so, out over four and two cells."""
    return Scenario(
        about=about,
        shape=FleetShape((DeploymentShape("llama", {"east": 4, "west": 2}, policy=POLICY),)),
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
    if not world.journal.counts["rollout.rolled_back"]:
        yield "the rollout was not rolled back"
    if len(touched := touched_cells(world)) > 1:
        yield f"{len(touched)} cells were touched: {', '.join(sorted(touched))}"
