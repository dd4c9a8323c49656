"""Random rollouts with failures, scaling and requests: no invariant breaks and each ends. `World` asserts I1 at every
disruption, and that no decision is stale or forbidden."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.deployments.planner import UpdatePolicy, UpdateStrategy
from fleet.reconcile.planning.states import CellState, RolloutState
from tests.fleet.world import NEW, OLD, Behaviour, World, rolling_out

BUSY_TICKS = 90
QUIET_TICKS = 900

policies = st.builds(
    UpdatePolicy,
    strategy=st.just(UpdateStrategy.IN_PLACE),
    max_unavailable=st.integers(1, 2),
    canary=st.booleans(),
    waves_percent=st.sampled_from([(100,), (50, 100), (10, 25, 50, 100)]),
    min_healthy_s=st.sampled_from([0.0, 3.0]),
    canary_bake_s=st.sampled_from([0.0, 4.0]),
    bake_s=st.just(4.0),
    progress_deadline_s=st.just(60.0),
) | st.builds(
    UpdatePolicy,
    strategy=st.just(UpdateStrategy.SURGE),
    max_unavailable=st.integers(0, 1),
    surge=st.integers(1, 2),
    min_healthy_s=st.just(3.0),
    canary_bake_s=st.just(4.0),
    bake_s=st.just(4.0),
    progress_deadline_s=st.just(60.0),
)
sizes = st.fixed_dictionaries({"east": st.integers(1, 4), "west": st.integers(1, 3)})
moments = st.integers(0, BUSY_TICKS)


def _surging(*, max_unavailable: int, surge: int) -> UpdatePolicy:
    return UpdatePolicy(
        strategy=UpdateStrategy.SURGE,
        max_unavailable=max_unavailable,
        surge=surge,
        min_healthy_s=3.0,
        canary_bake_s=4.0,
        bake_s=4.0,
        progress_deadline_s=60.0,
    )


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 3)
@given(
    policy=policies,
    wanted=sizes,
    behaviour=st.sampled_from(Behaviour),
    kills=st.lists(st.tuples(moments, st.integers(0, 9)), max_size=3),
    scalings=st.lists(st.tuples(moments, sizes), max_size=2),
    commands=st.lists(
        st.tuples(moments, st.sampled_from([RolloutState.PAUSED, RolloutState.ROLLING_BACK])), max_size=1
    ),
)
@example(  # a region that was scaled after its last stage may keep a cell of the old version
    policy=_surging(max_unavailable=1, surge=2),
    wanted={"east": 1, "west": 1},
    behaviour=Behaviour.GOOD,
    kills=[],
    scalings=[(14, {"east": 2, "west": 1})],
    commands=[],
)
@example(  # and another region has a surplus cell of the new version
    policy=_surging(max_unavailable=0, surge=1),
    wanted={"east": 1, "west": 3},
    behaviour=Behaviour.GOOD,
    kills=[],
    scalings=[(31, {"east": 2, "west": 1})],
    commands=[],
)
def test_a_rollout_ends_with_every_wanted_cell_at_one_version(
    policy: UpdatePolicy,
    wanted: dict[str, int],
    behaviour: Behaviour,
    kills: list[tuple[int, int]],
    scalings: list[tuple[int, dict[str, int]]],
    commands: list[tuple[int, RolloutState]],
) -> None:
    world = rolling_out(wanted, policy, behaviour=behaviour, warm=1)
    for tick in range(BUSY_TICKS):
        for _, index in (kill for kill in kills if kill[0] == tick):
            world.kill(index)
        for _, cells in (scaling for scaling in scalings if scaling[0] == tick):
            world.scale(cells)
        for _, state in (command for command in commands if command[0] == tick):
            world.put_rollout(state)
        world.tick()
        world.check_rules()
    _let_it_end(world)
    serving = [cell.version for cell in world.cells(CellState.READY)]
    assert serving == [world.fleet.deployments["llama"].version] * world.cells_wanted
    assert not any(cell.disruption for cell in world.fleet.cells.values())
    if behaviour in {Behaviour.CRASHES, Behaviour.FAILS_LATER}:
        assert world.outcome is not RolloutState.SUCCEEDED
    if behaviour is Behaviour.CRASHES and not scalings:
        assert len(world.touched) <= (1 if policy.canary else policy.max_unavailable)


def _let_it_end(world: World) -> None:
    """An operator resumes each paused rollout once, and rolls it back if it pauses again."""
    patience = 3
    for _ in range(QUIET_TICKS):
        world.tick()
        if world.rollout is None:
            break
        if world.rollout.state is RolloutState.PAUSED:
            patience -= 1
            world.put_rollout(RolloutState.RUNNING if patience > 0 else RolloutState.ROLLING_BACK)
    assert world.outcome in {RolloutState.SUCCEEDED, RolloutState.ROLLED_BACK}, world.rollout
    world.run(400, step_s=5)
    assert {OLD, NEW} >= {cell.version for cell in world.cells()}
