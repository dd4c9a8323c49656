"""Roles during role changes, scaling, failures and rollouts: some cell always answers, and only cells of the same
version pair."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.role_split import RoleSplit, answers, counted
from fleet.deployments.planner import ClaimView, UpdatePolicy, UpdateStrategy
from fleet.faults.planning.views import NoticeView
from fleet.reconcile.planning.snapshot import VersionView
from fleet.reconcile.planning.states import CellState, NoticeKind, RolloutState
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from tests.fleet.fleets import NOW
from tests.fleet.world import NAME, NEW, OLD, World

FAST = UpdatePolicy(min_healthy_s=1.0, bake_s=0.0, canary_bake_s=0.0, waves_percent=(50, 100))
HANDS_OVER = VersionView(1, engine="sim", hands_over=True)


def world(cells: int, *, policy: UpdatePolicy = FAST, spares: int = 0) -> World:
    """Mixed cells of one node, of versions that support separate prefill and decode cells."""
    others = {OLD: HANDS_OVER, NEW: HANDS_OVER}
    spec = DeploymentSpec(NAME, {"east": cells}, size=1, version=OLD, policy=policy, others=others)
    made = World(build_fleet(FleetSpec((spec,), spares=spares), NOW))
    made.store.deployments[NAME] = replace(made.store.deployments[NAME], hands_over=True)
    return made


def state_roles(made: World, cells: int, prefill: int, decode: int) -> None:
    claim = ClaimView(cells, prefill=prefill, decode=decode)
    made.store.deployments[NAME] = made.store.deployments[NAME].claiming("east", claim)


def ready(made: World, version: str | None = None) -> RoleSplit:
    return counted(cell.role for cell in made.cells(CellState.READY, version))


def ticks(made: World, seconds: int) -> Iterator[None]:
    for _ in range(seconds):
        made.tick()
        made.check_rules()
        yield


def settled(made: World, seconds: int = 120) -> RoleSplit:
    for _ in ticks(made, seconds):
        assert ready(made).answering >= 1
    return ready(made)


def test_mixed_cells_become_pairs_one_by_one() -> None:
    made = world(4)
    state_roles(made, 4, 1, 3)
    for _ in ticks(made, 60):
        assert len(made.cells(CellState.READY)) >= 3

    assert ready(made) == RoleSplit(prefill=1, decode=3)


def test_a_single_pair_is_made_of_two_cells_and_scaled_from_none() -> None:
    made = world(2)
    state_roles(made, 2, 1, 1)
    assert settled(made) == RoleSplit(prefill=1, decode=1)

    empty = world(0, spares=3)
    state_roles(empty, 3, 2, 1)
    for _ in ticks(empty, 60):
        pass
    assert ready(empty) == RoleSplit(prefill=2, decode=1)


def test_fewer_cells_keep_the_proportion_and_more_are_mixed_until_a_role_is_stated() -> None:
    made = world(6, spares=2)
    state_roles(made, 6, 2, 4)
    settled(made)
    state_roles(made, 3, 2, 4)
    assert settled(made) == RoleSplit(prefill=1, decode=2)

    state_roles(made, 8, 2, 4)
    assert settled(made) == RoleSplit(mixed=2, prefill=2, decode=4)


def test_a_cell_that_breaks_comes_back_in_its_role() -> None:
    made = world(3, spares=1)
    state_roles(made, 3, 1, 2)
    settled(made)
    made.dead.add(next(cell.members[0].node for cell in made.cells() if cell.role is CellRole.PREFILL))

    assert settled(made) == RoleSplit(prefill=1, decode=2)


def test_cells_of_a_version_that_hands_nothing_over_are_mixed() -> None:
    made = world(3)
    state_roles(made, 3, 1, 2)
    settled(made)
    plain = replace(HANDS_OVER, hands_over=False)
    made.store.deployments[NAME] = replace(made.store.deployments[NAME], others={OLD: HANDS_OVER, NEW: plain})
    made.roll_out()
    made.run(300, RolloutState.SUCCEEDED)

    assert ready(made) == RoleSplit(mixed=3)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 4), (3, 2)])
def test_a_rollout_always_leaves_a_pair(prefill: int, decode: int) -> None:
    made = world(prefill + decode)
    state_roles(made, prefill + decode, prefill, decode)
    settled(made)
    made.roll_out()
    while made.outcome is None:
        made.tick()
        pairs = [ready(made, version) for version in (OLD, NEW)]
        assert any(split.prefill and split.decode for split in pairs)

    assert made.outcome is RolloutState.SUCCEEDED
    assert ready(made, NEW) == RoleSplit(prefill=prefill, decode=decode)


def test_a_pair_is_surged_at_once() -> None:
    policy = UpdatePolicy(
        strategy=UpdateStrategy.SURGE, surge=2, max_unavailable=0, min_healthy_s=1.0, bake_s=0.0, canary_bake_s=0.0
    )
    made = world(2, spares=2)
    state_roles(made, 2, 1, 1)
    settled(made)
    made.store.deployments[NAME] = replace(made.store.deployments[NAME], policy=policy)
    made.roll_out()
    while made.outcome is None:
        made.tick()
        assert any(ready(made, version) == RoleSplit(prefill=1, decode=1) for version in (OLD, NEW))

    made.run(20)
    assert ready(made) == ready(made, NEW) == RoleSplit(prefill=1, decode=1)


@pytest.mark.slow
@given(cells=st.integers(1, 8), stated=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=3))
def test_whatever_is_stated_cells_that_answer_never_run_out_and_roles_arrive(
    cells: int, stated: list[tuple[int, int]]
) -> None:
    made = world(cells)
    for prefill, decode in stated:
        state_roles(made, cells, prefill, decode)
        for _ in ticks(made, 15):
            assert any(answers(cell.role) for cell in made.cells(CellState.READY)) or cells == 1
    made.run(120, step_s=5)

    if cells > 1:
        assert ready(made) == made.store.deployments[NAME].split("east")


def test_who_comes_for_a_machine_that_ends_has_its_role() -> None:
    made = world(3, spares=1)
    state_roles(made, 3, 1, 2)
    settled(made)
    ending = next(cell for cell in made.cells() if cell.role is CellRole.PREFILL)
    node = ending.members[0].node
    made.store.notices += (NoticeView(node, NoticeKind.INTERRUPTION, made.now, made.now + timedelta(seconds=110)),)
    created = set(made.store.cells)
    for _ in ticks(made, 60):
        pass

    assert [made.store.cells[name].role for name in made.store.cells.keys() - created] in ([], [CellRole.PREFILL])
    assert ready(made) == RoleSplit(prefill=1, decode=2)
