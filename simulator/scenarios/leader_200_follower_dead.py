"""A leader goes on answering 200 while its follower is dead. The follower's agent, or its provider, must be
enough to notice."""

from collections.abc import Iterator

from simulator.final_checks import all_well
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.scenario import Scenario
from simulator.world import World

NOTICED_WITHIN_S = 40.0


def play(world: World) -> None:
    cells = sorted(world.store.cells.values(), key=lambda cell: cell.id)
    cell = world.random.choice(cells)
    leader, follower = (world.provider.machines[member.node] for member in cell.members)
    if leader.engine is not None:
        leader.engine.blind = True

    def die() -> None:
        world.context.note("fault", follower.node, f"the follower of {cell.id} dies, its leader sees nothing")
        if world.random.random() < 0.5 and follower.engine is not None:
            world.engines.end(follower.engine, "exit code 137: killed")
        else:
            follower.power_off(silently=True)

    world.queue.at(30.0, die)


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    broken = [entry for entry in world.timeline.entries if entry.kind in {"cell.failed", "cell.lost"}]
    if not broken:
        yield "nobody noticed that a follower was dead"
    elif broken[0].at_s > 30.0 + NOTICED_WITHIN_S:
        yield f"it took {broken[0].at_s - 30.0:.0f} s to notice that a follower was dead"


SCENARIOS = {
    "leader_200_follower_dead": Scenario(
        about="A blind leader: its /health stays 200 when its follower dies.",
        fleet=FleetSpec((DeploymentSpec("llama", {"east": 3}),)),
        play=play,
        until_s=300.0,
        expect=expect,
    )
}
