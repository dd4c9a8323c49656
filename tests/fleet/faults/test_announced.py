"""Merges of notices, and random notices in random fleets: no serving cell is cut off, and all cells come back."""

from datetime import timedelta
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.faults.planning.announced import Notices, merge
from fleet.faults.planning.views import NoticeView
from fleet.reconcile.planning.decisions import Decision, DrainCell
from fleet.reconcile.planning.states import CellState, NoticeKind
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node
from tests.fleet.world import NAME, World

pytestmark = pytest.mark.slow

HEARD = (
    NoticeView("n", NoticeKind.INTERRUPTION, ago(9)),
    NoticeView("n", NoticeKind.INTERRUPTION, ago(5), NOW + timedelta(seconds=90)),
    NoticeView("n", NoticeKind.INTERRUPTION, ago(3), NOW + timedelta(seconds=80)),
    NoticeView("n", NoticeKind.REBALANCE, ago(60)),
    NoticeView("m", NoticeKind.INTERRUPTION, ago(1), NOW + timedelta(seconds=100)),
)


def test_of_each_kind_the_earliest_end_counts_in_whatever_order_and_however_often_it_came() -> None:
    merged = merge(HEARD)
    assert merged == (HEARD[4], HEARD[2], HEARD[3])
    assert all(merge((*order, *order)) == merged for order in permutations(HEARD))


def announced(*notices: NoticeView) -> Notices:
    parts = (member("n"), member("o"), node("s"), cell("c1", "n", "o"))
    view = fleet(*parts)
    return Notices(type(view)(**{**view.__dict__, "notices": notices}), SETTINGS, NOW)


def test_a_capacity_block_counts_half_an_hour_before_its_machines_end_and_a_stranger_never() -> None:
    def block(lead_s: float) -> NoticeView:
        return NoticeView("n", NoticeKind.BLOCK_END, ago(9), NOW + timedelta(seconds=lead_s))

    assert announced(block(1801)).end_of("n") is None
    assert announced(block(1799)).end_of("n") == NOW + timedelta(seconds=1799)
    assert announced(NoticeView("gone", NoticeKind.INTERRUPTION, NOW, NOW)).by_node == {}


def test_a_cell_goes_when_all_its_machines_end() -> None:
    ends = [NoticeView(name, NoticeKind.RETIREMENT, NOW, NOW + timedelta(days=2)) for name in ("n", "o")]
    assert announced(ends[0]).going == frozenset()
    assert announced(*ends).going == {"c1"}
    assert announced(ends[0], NoticeView("o", NoticeKind.REBALANCE, NOW)).going == frozenset()


def test_a_cell_goes_when_all_its_machines_are_to_run_another_image_and_nothing_forces_it() -> None:
    moved = [NoticeView(name, NoticeKind.IMAGE, NOW) for name in ("n", "o")]
    assert announced(moved[0]).going == frozenset()
    notices = announced(*moved, NoticeView("n", NoticeKind.REBALANCE, ago(9)))
    assert notices.going == {"c1"}
    assert not notices.must_drain(notices.fleet.cells["c1"])


class Announcing(World):
    """Machines end as announced. Checks that no serving cell is cut off or drained too early."""

    forced = 0

    def tick(self, seconds: float = 1.0) -> None:
        self.now += timedelta(seconds=seconds)
        for notice in self.store.notices:
            if notice.ends_at is not None and notice.ends_at <= self.now and notice.node in self.store.nodes:
                self._end(notice.node)
        super().tick(0.0)

    def _end(self, name: str) -> None:
        holder = self.store.cells.get(self.store.member_of.get(name, ""))
        assert holder is None or holder.state is not CellState.READY, f"{name} ends, and {holder} serves on it"
        self.dead.add(name)

    def apply(self, decision: Decision) -> None:
        if isinstance(decision, DrainCell) and decision.forced:
            self.forced += 1
            notices = Notices(self._view(), SETTINGS, self.now)
            assert notices.must_drain(self.store.cells[decision.cell]), decision
        super().apply(decision)


NOTICE = st.tuples(
    st.integers(3, 30),
    st.integers(0, 9),
    st.sampled_from(
        [
            (NoticeKind.INTERRUPTION, 120.0),
            (NoticeKind.MAINTENANCE, 400.0),
            (NoticeKind.BLOCK_END, 500.0),
            (NoticeKind.REBALANCE, None),
            (NoticeKind.IMPAIRED, None),
            (NoticeKind.IMAGE, None),
        ]
    ),
)


@given(
    wanted=st.integers(1, 3),
    nodes_per_cell=st.integers(1, 2),
    warm=st.integers(0, 2),
    notices=st.lists(NOTICE, min_size=1, max_size=6),
    repeated=st.booleans(),
)
def test_whatever_is_announced_nothing_that_serves_is_cut_off_and_all_cells_come_back(
    wanted: int,
    nodes_per_cell: int,
    warm: int,
    notices: list[tuple[int, int, tuple[NoticeKind, float | None]]],
    repeated: bool,
) -> None:
    """The world asserts I1 at every drain that is not forced, and that no cordoned node is ever uncordoned."""
    world = Announcing(fleet(wanted=wanted, nodes_per_cell=nodes_per_cell, warm=warm))
    for tick in range(110):
        for _, index, (kind, lead_s) in (notice for notice in notices if notice[0] == tick):
            world.announce(index, kind, lead_s)
            if repeated:
                world.store.notices = world.store.notices[::-1] * 2
        cordoned = {name for name, view in world.store.nodes.items() if view.cordoned}
        world.tick(1.0 if tick < 60 else 10.0)
        world.check_rules()
        assert all(world.store.nodes[name].cordoned for name in cordoned & set(world.store.nodes))
    assert len(world.cells(CellState.READY)) == world.store.deployments[NAME].cells_wanted["east"]
    kept = {node for notice in world.store.notices if notice.ends_at for node in [notice.node]}
    assert not kept & set(world.store.nodes), "what ends was given back before"


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("nodes_per_cell", [1, 2])
def test_a_cell_that_is_to_run_another_image_serves_until_another_does(nodes_per_cell: int, warm: int) -> None:
    world = Announcing(fleet(wanted=2, nodes_per_cell=nodes_per_cell, warm=warm))
    for _ in range(30):
        world.tick()
    first = world.cells(CellState.READY)[0]
    moved = [one.node for one in first.members]
    world.store.notices = tuple(NoticeView(name, NoticeKind.IMAGE, world.now) for name in moved)
    for _ in range(80):
        world.tick()
        world.check_rules()
        assert len(world.cells(CellState.READY)) >= 2, "another one is made first"
    assert world.forced == 0
    assert not set(moved) & set(world.store.nodes)


@pytest.mark.parametrize("nodes_per_cell", [1, 2, 3])
@pytest.mark.parametrize("lead_s", [120.0, 400.0])
def test_a_lone_cell_serves_until_another_does_where_spares_make_one(nodes_per_cell: int, lead_s: float) -> None:
    world = Announcing(fleet(wanted=1, nodes_per_cell=nodes_per_cell, warm=nodes_per_cell))
    for _ in range(80):
        world.tick()
    leader = world.cells(CellState.READY)[0].members[0].node
    world.store.notices = (
        NoticeView(leader, NoticeKind.INTERRUPTION, world.now, world.now + timedelta(seconds=lead_s)),
    )
    for _ in range(int(lead_s) + 120):
        world.tick()
        world.check_rules()
        assert world.cells(CellState.READY), "something serves"
    world.run(400, step_s=10)
    assert leader not in world.store.nodes
    assert [one.state for one in world.store.cells.values()] == [CellState.READY]
    assert world.spare_count() == nodes_per_cell
