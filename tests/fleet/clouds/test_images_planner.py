"""Image moves: one unit first, then place by place, and back if launches do not boot."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.clouds.planning.upkeep import SETTINGS, ImageMachine, ImageState, ImageStep, plan_image, takes_new
from fleet.reconcile.planning.states import NodeState
from tests.fleet.fleets import NOW

LONG_AGO = NOW - timedelta(days=1)
JUST_NOW = NOW - timedelta(seconds=1)


def old(node: str, cell: str = "", **changes: object) -> ImageMachine:
    machine = ImageMachine(node, f"u-{node}", cell, False, NodeState.READY, LONG_AGO)
    return replace(machine, **changes)  # type: ignore[arg-type]


def new(node: str, cell: str = "", state: NodeState = NodeState.READY, since: datetime = LONG_AGO) -> ImageMachine:
    return ImageMachine(node, f"u-{node}", cell, True, state, since)


def step(state: ImageState, *machines: ImageMachine, failed: frozenset[str] = frozenset()) -> ImageStep:
    return plan_image(state, machines, (), failed, NOW)


def test_a_spare_leaves_first_so_that_a_unit_is_launched() -> None:
    made = step(ImageState.CANARY, old("n-1", "c-1"), old("n-2", "c-1"), old("n-3"))
    assert (made.state, made.leave, made.reason) == (ImageState.CANARY, ("n-3",), "n-3 leaves for it")


def test_without_a_spare_a_whole_cell_leaves_whatever_its_machines_run() -> None:
    assert step(ImageState.ROLLING, old("n-1", "c-1"), new("n-2", "c-1"), old("n-3", "c-2")).leave == ("n-1", "n-2")


def test_where_nothing_runs_the_next_launch_is_the_first() -> None:
    assert step(ImageState.CANARY).reason == "no machine runs: it is tried by the next launch"


@pytest.mark.parametrize(
    ("canary", "state", "reason"),
    [
        (new("n-2", state=NodeState.JOINING), ImageState.CANARY, "the first unit boots"),
        (new("n-2", since=JUST_NOW), ImageState.CANARY, "the first unit has been ready since 11:59:59 UTC"),
        (new("n-2", state=NodeState.FAULTY), ImageState.CANARY, "the first unit boots"),
        (new("n-2"), ImageState.ROLLING, "the first unit was ready for 600 s"),
    ],
)
def test_nothing_else_leaves_before_the_first_unit_was_ready_for_a_while(
    canary: ImageMachine, state: ImageState, reason: str
) -> None:
    made = step(ImageState.CANARY, old("n-1"), canary)
    assert (made.state, made.reason, made.leave) == (state, reason, ())


def test_one_place_leaves_at_a_time_and_not_while_another_boots() -> None:
    assert step(ImageState.ROLLING, old("n-1", is_leaving=True), old("n-2")).reason == "n-1 leaves"
    assert step(ImageState.ROLLING, old("n-1"), new("n-2", state=NodeState.JOINING)).reason == "n-2 boots"
    assert step(ImageState.ROLLING, old("n-1"), new("n-2")).leave == ("n-1",)


def test_it_is_done_when_nothing_runs_the_old_one() -> None:
    assert step(ImageState.ROLLING, new("n-1"), new("n-2", "c-1")).state is ImageState.DONE
    assert step(ImageState.BACK, old("n-1")).state is ImageState.DONE


def test_one_launch_that_does_not_boot_is_bad_luck_and_a_second_turns_it_round() -> None:
    lost = new("n-2", state=NodeState.LOST)
    first = step(ImageState.CANARY, old("n-1", is_leaving=True), lost)
    assert (first.state, first.failed) == (ImageState.CANARY, frozenset({"u-n-2"}))
    second = step(ImageState.CANARY, old("n-1"), new("n-3", state=NodeState.LOST), failed=first.failed)
    assert (second.state, second.reason) == (ImageState.BACK, "2 launches from it did not boot")
    assert step(ImageState.ROLLING, new("n-3", state=NodeState.LOST), failed=first.failed).state is ImageState.BACK


def test_a_node_that_is_lost_after_it_was_ready_did_boot() -> None:
    lost = new("n-2", state=NodeState.LOST)
    assert plan_image(ImageState.ROLLING, [lost], {"n-2"}, {"u-1"}, NOW).failed == {"u-1"}


def test_back_moves_those_that_run_the_new_image_and_nobody_fails_it() -> None:
    made = step(ImageState.BACK, old("n-1"), new("n-2", "c-1"), new("n-3", "c-1"), failed=frozenset("abc"))
    assert (made.state, made.leave) == (ImageState.BACK, ("n-2", "n-3"))


@pytest.mark.parametrize(
    ("state", "machines", "open_units", "expected"),
    [
        (ImageState.CANARY, [old("n-1")], (), True),
        (ImageState.CANARY, [old("n-1")], ("u-9",), False),
        (ImageState.CANARY, [new("n-1", state=NodeState.JOINING)], (), False),
        (ImageState.CANARY, [new("n-1", state=NodeState.LOST)], (), True),
        (ImageState.ROLLING, [new("n-1", state=NodeState.JOINING)], ("u-9",), True),
        (ImageState.BACK, [old("n-1")], (), False),
    ],
)
def test_one_unit_is_tried_and_then_all_launches_are_from_it(
    state: ImageState, machines: list[ImageMachine], open_units: tuple[str, ...], expected: bool
) -> None:
    assert takes_new(state, machines, open_units) is expected


@dataclass
class Fleet:
    """Replaces leaving machines by launches that boot or fail, and reports both to the planner."""

    machines: dict[str, ImageMachine]
    boots: list[bool]
    state: ImageState = ImageState.CANARY
    booted: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    now: datetime = NOW
    most_on_new_in_canary: int = 0
    launched: list[str] = field(default_factory=list)

    def a_round(self) -> None:
        made = plan_image(self.state, list(self.machines.values()), self.booted, self.failed, self.now)
        self.state, self.booted, self.failed = made.state, made.booted, made.failed
        for node in made.leave:
            self.machines[node] = replace(self.machines[node], is_leaving=True)
        self._launch()
        if self.state is ImageState.CANARY:
            alive = [one for one in self.machines.values() if one.is_new and one.state is not NodeState.LOST]
            self.most_on_new_in_canary = max(self.most_on_new_in_canary, len({one.unit for one in alive}))
        self.now += timedelta(seconds=SETTINGS.healthy_s)

    def _launch(self) -> None:
        """Replaces leaving machines; failed ones are removed a round later."""
        self.machines = {node: one for node, one in self.machines.items() if one.state is not NodeState.LOST}
        leaving = [one for one in self.machines.values() if one.is_leaving]
        if not leaving:
            return
        is_new = takes_new(self.state, list(self.machines.values()), ())
        does_boot = not is_new or (self.boots.pop() if self.boots else True)
        unit = f"u-{len(self.launched)}"
        self.launched.append(unit)
        for index, gone in enumerate(leaving):
            state = NodeState.READY if does_boot else NodeState.LOST
            node = f"{unit}-{index}"
            self.machines[node] = ImageMachine(node, unit, gone.cell if does_boot else "", is_new, state, self.now)
            if does_boot:
                del self.machines[gone.node]


@given(
    cells=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    boots=st.lists(st.booleans(), max_size=6),
)
def test_a_move_ends_with_one_image_and_never_loses_a_place(cells: list[int], boots: list[bool]) -> None:
    first = {f"n-{n}": old(f"n-{n}", f"c-{cell}" if cell else "") for n, cell in enumerate(cells)}
    fleet = Fleet(dict(first), boots)
    for _ in range(60):
        fleet.a_round()
        standing = [one for one in fleet.machines.values() if one.state is not NodeState.LOST]
        assert len(standing) == len(first)
        if fleet.state is ImageState.DONE:
            break
    assert fleet.state is ImageState.DONE
    assert fleet.most_on_new_in_canary <= 1
    images = {one.is_new for one in fleet.machines.values() if one.state is not NodeState.LOST}
    assert images == {len(fleet.failed) <= SETTINGS.failed_most}
