"""Whole rollouts in memory, with good and bad versions."""

from dataclasses import replace

import pytest
from msgspec import structs

from fleet.deployments.planner import GatePolicy, UpdatePolicy, UpdateStrategy
from fleet.faults.planning.views import NO_USABLE_CELL, IncidentView
from fleet.reconcile.planning.decisions import ChangeRollout
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.states import CellState, RolloutState
from fleet.rollouts.planning.planner import cause_after, plan_rollout
from tests.fleet.fleets import NOW
from tests.fleet.world import NAME, NEW, OLD, Behaviour, World, rolling_out

pytestmark = pytest.mark.slow

QUICK = UpdatePolicy(min_healthy_s=3, canary_bake_s=4, bake_s=4, progress_deadline_s=60)
SURGE = UpdatePolicy(
    strategy=UpdateStrategy.SURGE, surge=1, min_healthy_s=3, canary_bake_s=4, bake_s=4, progress_deadline_s=60
)
TWO = {"east": 3, "west": 2}


def versions(world: World) -> list[str]:
    return sorted(cell.version for cell in world.cells(CellState.READY))


@pytest.mark.parametrize("policy", [QUICK, SURGE], ids=["in place", "surge"])
def test_a_good_version_reaches_every_cell(policy: UpdatePolicy) -> None:
    world = rolling_out(TWO, policy)
    world.run(400, until=RolloutState.SUCCEEDED)
    world.run(30)
    assert world.outcome is RolloutState.SUCCEEDED
    assert versions(world) == [NEW] * 5
    assert not [cell for cell in world.fleet.cells.values() if cell.disruption]


@pytest.mark.parametrize("sold_out", [False, True], ids=["machines are sold", "sold out"])
def test_in_place_without_any_spare_ends_on_the_machines_that_there_are(sold_out: bool) -> None:
    world = rolling_out(TWO, QUICK)
    world.sold_out, machines = sold_out, set(world.fleet.nodes)
    world.run(400, until=RolloutState.SUCCEEDED)
    assert (world.outcome, versions(world)) == (RolloutState.SUCCEEDED, [NEW] * 5)
    assert set(world.fleet.nodes) == machines


def test_the_only_cell_of_a_deployment_is_moved_by_a_surge_without_a_gap() -> None:
    world = rolling_out({"east": 1}, SURGE)
    for _ in range(200):
        world.tick()
        assert world.cells(CellState.READY)
    assert (world.outcome, versions(world)) == (RolloutState.SUCCEEDED, [NEW])


@pytest.mark.parametrize("policy", [QUICK, SURGE], ids=["in place", "surge"])
@pytest.mark.parametrize("behaviour", [Behaviour.CRASHES, Behaviour.FAILS_LATER, Behaviour.SLOW])
def test_a_bad_version_touches_one_cell_and_is_rolled_back_while_the_others_serve(
    behaviour: Behaviour, policy: UpdatePolicy
) -> None:
    world = rolling_out(TWO, policy, behaviour=behaviour)
    for _ in range(300):
        world.tick()
        assert len(world.cells(CellState.READY, OLD)) >= 5 - policy.max_unavailable
        if world.outcome is not None:
            break
    world.run(30)
    assert world.outcome is RolloutState.ROLLED_BACK
    assert len(world.touched) == 1
    assert versions(world) == [OLD] * 5


def test_without_a_canary_a_bad_version_touches_what_may_be_away_at_once() -> None:
    policy = structs.replace(QUICK, canary=False, waves_percent=(100,), max_unavailable=2)
    world = rolling_out(TWO, policy, behaviour=Behaviour.CRASHES)
    world.run(300, until=RolloutState.ROLLED_BACK)
    assert world.outcome is RolloutState.ROLLED_BACK
    assert len(world.touched) == 2


def test_a_version_that_reports_nothing_is_not_promoted() -> None:
    world = rolling_out(TWO, QUICK, behaviour=Behaviour.SILENT)
    world.run(60, until=RolloutState.PAUSED)
    assert world.rollout is not None
    assert world.rollout.state is RolloutState.PAUSED
    assert "no updated cell has reported" in world.rollout.reason
    assert len(world.touched) == 1


def test_a_bake_with_too_few_samples_goes_on_until_it_has_them() -> None:
    world = rolling_out(TWO, structs.replace(QUICK, gate=GatePolicy(min_samples=110)))
    world.run(60, until=RolloutState.BAKING)
    world.run(int(QUICK.canary_bake_s) + 1)
    assert world.rollout is not None
    assert (world.rollout.state, "too few samples yet" in world.rollout.reason) == (RolloutState.BAKING, True)
    world.run(400, until=RolloutState.SUCCEEDED)
    assert world.outcome is RolloutState.SUCCEEDED


def test_a_cell_of_an_earlier_region_that_is_unwell_holds_the_last_stage() -> None:
    world = rolling_out(TWO, QUICK)
    while world.rollout is not None and "west 100 %: 2 updated, watched" not in world.rollout.reason:
        world.tick()
    unwell = next(cell for cell in world.cells(CellState.READY) if cell.region == "east")
    world.unwell.add(unwell.members[0].node)
    world.run(2 * int(QUICK.bake_s))
    assert world.rollout is not None
    assert world.rollout.state is RolloutState.BAKING
    assert f"{unwell.id}, updated, has not reported recently" in world.rollout.reason
    world.unwell.clear()
    world.run(400, until=RolloutState.SUCCEEDED)
    assert world.outcome is RolloutState.SUCCEEDED


def test_a_bake_that_never_has_enough_samples_pauses() -> None:
    world = rolling_out(TWO, structs.replace(QUICK, gate=GatePolicy(min_samples=1000)))
    world.run(60, until=RolloutState.BAKING)
    began = world.now
    world.run(60, until=RolloutState.PAUSED)
    assert world.rollout is not None
    assert "at least 1000 of each needed" in world.rollout.reason
    assert (world.now - began).total_seconds() == 3 * QUICK.canary_bake_s


def test_two_regions_never_have_cells_away_at_once() -> None:
    world = rolling_out(TWO, QUICK)
    for _ in range(300):
        world.tick()
        away = {cell.region for cell in world.fleet.cells.values() if cell.disruption}
        assert len(away) <= 1
    assert world.outcome is RolloutState.SUCCEEDED


def test_a_paused_rollout_takes_nothing_further_down_and_goes_on_when_resumed() -> None:
    world = rolling_out(TWO, QUICK)
    world.run(2)
    world.put_rollout(RolloutState.PAUSED)
    world.run(30)
    assert len(world.cells(CellState.READY)) == 5
    assert versions(world).count(NEW) <= 1
    world.put_rollout(RolloutState.RUNNING)
    world.run(400, until=RolloutState.SUCCEEDED)
    assert world.outcome is RolloutState.SUCCEEDED


@pytest.mark.parametrize("policy", [QUICK, SURGE], ids=["in place", "surge"])
@pytest.mark.parametrize("moment", [1, 5, 12, 25, 40])
def test_a_rollout_can_be_rolled_back_at_any_moment(moment: int, policy: UpdatePolicy) -> None:
    world = rolling_out(TWO, policy)
    world.run(moment)
    world.put_rollout(RolloutState.ROLLING_BACK)
    world.run(200, until=RolloutState.ROLLED_BACK)
    world.run(30)
    assert (world.outcome, versions(world)) == (RolloutState.ROLLED_BACK, [OLD] * 5)


@pytest.mark.parametrize("moment", [0, 10, 20])
def test_a_rollout_and_a_scale_up_at_once_both_come_to_their_end(moment: int) -> None:
    world = rolling_out(TWO, QUICK)
    world.run(moment)
    world.scale({"east": 5, "west": 4})
    world.run(600, until=RolloutState.SUCCEEDED)
    world.run(30)
    assert (world.outcome, versions(world)) == (RolloutState.SUCCEEDED, [NEW] * 9)


def test_a_rollout_ends_although_a_node_is_lost_meanwhile_and_blames_nobody() -> None:
    world = rolling_out(TWO, QUICK, warm=1)
    world.run(12)
    world.kill(0)
    world.run(600, until=RolloutState.SUCCEEDED)
    world.run(30)
    assert world.outcome is RolloutState.SUCCEEDED
    assert world.ended[-1].failed == ()
    assert versions(world) == [NEW] * 5


def test_without_automatic_rollback_two_failures_wait_for_an_operator() -> None:
    policy = UpdatePolicy(min_healthy_s=3, canary_bake_s=4, bake_s=4, auto_rollback=False)
    world = rolling_out(TWO, policy, behaviour=Behaviour.CRASHES)
    world.run(100, until=RolloutState.PAUSED)
    assert world.rollout is not None
    assert "automatic rollback is off" in world.rollout.reason
    assert len(world.touched) == 1


@pytest.mark.parametrize(
    ("percent", "to", "reason"),
    [(2, RolloutState.ROLLING_BACK, "2 failures of updated"), (75, RolloutState.RUNNING, "held after 2 of 3 failures")],
)
def test_more_failures_are_borne_among_many_updated_cells(percent: int, to: RolloutState, reason: str) -> None:
    world = rolling_out({"east": 6}, structs.replace(QUICK, max_failed_percent=percent))
    while len(updated := world.cells(CellState.READY, NEW)) < 4:
        world.tick()
    failed = {cell.id: replace(cell, state=CellState.FAILED) for cell in updated[:2]}
    fleet = replace(world.fleet, cells={**world.fleet.cells, **failed})
    (change,) = plan_rollout(fleet, FleetSettings(), world.now)
    assert isinstance(change, ChangeRollout)
    assert (change.to, change.reason.startswith(reason), len(change.failed)) == (to, True, 2)


def test_a_surge_that_gets_no_nodes_says_so_and_pauses() -> None:
    world = rolling_out({"east": 2}, SURGE)
    world.sold_out = True
    world.run(90, until=RolloutState.PAUSED)
    assert world.rollout is not None
    assert world.rollout.reason.startswith("no progress for ")
    assert "pending (needs 2 simulated.8xl" in world.rollout.reason
    assert versions(world) == [OLD] * 2


def test_an_outage_of_the_deployment_pauses_its_rollout_and_blames_no_version() -> None:
    world = rolling_out(TWO, QUICK)
    world.run(5)
    outage = IncidentView(1, NO_USABLE_CELL, f"{NAME}@east", NOW, NOW, summary=f"No cell of {NAME} in east can serve")
    before = world.fleet
    other = replace(outage, subject=f"{NAME}-2@east")

    def decided(incident: IncidentView) -> list[ChangeRollout]:
        seen = replace(before, faults=replace(before.faults, incidents=(incident,)))
        return [each for each in plan_rollout(seen, FleetSettings(), world.now) if isinstance(each, ChangeRollout)]

    assert all(change.to is RolloutState.RUNNING for change in decided(other))
    (change,) = decided(outage)
    assert change.to is RolloutState.PAUSED
    assert change.reason == "No cell of llama in east can serve; resume once it serves, or roll back"


@pytest.mark.parametrize(
    ("turns", "cause"),
    [
        (["running", "baking", "succeeded"], ""),
        (["running", "paused"], "because paused"),
        (["running", "paused", "running"], ""),
        (["running", "rolling_back", "rolled_back"], "because rolling_back"),
        (["paused", "rolling_back", "failed"], "because rolling_back"),
        (["running", "failed"], "because failed"),
    ],
    ids=" to ".join,
)
def test_the_cause_of_a_turn_stays_until_the_rollout_moves_forward(turns: list[str], cause: str) -> None:
    known = ""
    for turn in turns:
        known = cause_after(known, RolloutState(turn), f"because {turn}")
    assert known == cause
