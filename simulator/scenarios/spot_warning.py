"""Providers announce that machines end: what runs on them is drained before, and others take their place."""

from collections.abc import Callable, Iterator
from functools import partial

from fleet.planning.policy import UpdatePolicy
from fleet.planning.states import NoticeKind
from simulator.fault_injection import announce
from simulator.final_checks import all_well, never_touched
from simulator.fleet_spec import DeploymentSpec, FleetSpec
from simulator.scenario import Scenario
from simulator.world import World

AT_S = 30.0
SPOT_S = 120.0
"""EC2's warning before it takes a spot machine back."""
BLOCK_S = 2400.0
POLICY = UpdatePolicy(min_healthy_s=10.0)


def play(world: World, cells: int, ranks: tuple[int, ...], kind: NoticeKind, lead_s: float) -> None:
    """Machines of these ranks, of so many cells."""
    chosen = sorted(world.store.cells)[:cells]
    nodes = [m.node for cell in chosen for m in world.store.cells[cell].members if m.rank in ranks]
    world.queue.at(AT_S, lambda: announce(world, nodes, kind, lead_s))


def expect(world: World) -> Iterator[str]:
    yield from all_well(world)
    yield from never_touched(world, ("node.lost", "cell.failed"))
    told = {notice.node for notice in world.store.notices}
    yield from (f"{node} is still there" for node in sorted(told & set(world.store.nodes)))


def _scenario(
    about: str, spares: int, happens: Callable[[World], None], busy_s: float = 300.0, *, cells: int = 4
) -> Scenario:
    return Scenario(
        about=about,
        fleet=FleetSpec((DeploymentSpec("llama", {"east": cells}, policy=POLICY),), spares=spares),
        play=happens,
        until_s=3000.0,
        busy_s=busy_s,
        expect=expect_service if cells == 1 else expect,
    )


def expect_service(world: World) -> Iterator[str]:
    """Of a lone cell: another one was ready before it was drained."""
    yield from expect(world)
    kinds = [entry.kind for entry in world.timeline.entries if entry.kind in {"cell.ready", "cell.draining"}]
    if kinds != ["cell.ready", "cell.draining"]:
        yield f"of one cell another one must get ready, and then the first drain; it was {', '.join(kinds)}"


def _spot(cells: int, rank: int) -> Callable[[World], None]:
    return partial(play, cells=cells, ranks=(rank,), kind=NoticeKind.INTERRUPTION, lead_s=SPOT_S)


SCENARIOS = {
    "spot_warning": _scenario("A leader is taken back in two minutes; spares are there.", 2, _spot(1, 0)),
    "spot_warning_without_spare": _scenario(
        "A follower is taken back in two minutes, and another machine must be bought.", 0, _spot(1, 1)
    ),
    "spot_warning_lone_cell": _scenario(
        "The leader of the only cell is taken back in two minutes; spares make another one.", 2, _spot(1, 0), cells=1
    ),
    "lone_cell_retires": _scenario(
        "A machine of the only cell is taken in 40 minutes; machines for another one are bought.",
        0,
        partial(play, cells=1, ranks=(0,), kind=NoticeKind.RETIREMENT, lead_s=BLOCK_S),
        busy_s=2700.0,
        cells=1,
    ),
    "spot_warning_everywhere": _scenario(
        "A machine of each cell is taken back in two minutes: more than the ledger allows to go.", 1, _spot(4, 0)
    ),
    "block_ends": _scenario(
        "All machines of two cells end in 40 minutes: others come first.",
        0,
        partial(play, cells=2, ranks=(0, 1), kind=NoticeKind.BLOCK_END, lead_s=BLOCK_S),
        busy_s=2700.0,
    ),
}
