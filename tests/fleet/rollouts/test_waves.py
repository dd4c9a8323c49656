"""The stages of a rollout in cells, and the order of stages."""

from dataclasses import replace

import pytest
from msgspec import structs

from fleet.autoscaling.planning.role_split import RoleSplit
from fleet.deployments.planner import UpdatePolicy, UpdateStrategy
from fleet.reconcile.planning.snapshot import DeploymentView, RolloutView
from fleet.reconcile.planning.states import RolloutState
from fleet.rollouts.planning.waves import (
    RolloutProgress,
    objection,
    order_of_regions,
    preview_seconds,
    preview_stages,
    progress_of,
)
from tests.fleet.fleets import KIND, NOW

POLICY = UpdatePolicy(min_healthy_s=60, canary_bake_s=300, bake_s=300)


def progress(stage: int, wanted: dict[str, int], state: RolloutState = RolloutState.RUNNING) -> RolloutProgress:
    deployment = DeploymentView("llama", KIND, 2, wanted)
    return RolloutProgress(
        RolloutView(1, "llama", "v1", "v2", state, stage, ("east", "west"), POLICY, 1, NOW), deployment
    )


def walk(wanted: dict[str, int]) -> list[tuple[str, int]]:
    """(label, cells of its region on the goal version) of each stage."""
    stage: int | None = 0
    found = []
    while stage is not None:
        at = progress(stage, wanted)
        found.append((at.stage.label, at.quota(at.stage.region)))
        stage = at.next_stage()
    return found


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"east": 1}, [("east canary", 1)]),
        ({"east": 2}, [("east canary", 1), ("east 100 %", 2)]),
        (
            {"east": 20, "west": 1},
            [("east canary", 1), ("east 10 %", 2), ("east 25 %", 5), ("east 50 %", 10), ("east 100 %", 20),
             ("west 10 %", 1)],
        ),
        ({"east": 0, "west": 2}, [("east canary", 0), ("west 10 %", 1), ("west 100 %", 2)]),
    ],
)  # fmt: skip
def test_stages_that_move_no_cell_are_passed_over(wanted: dict[str, int], expected: list[tuple[str, int]]) -> None:
    assert walk(wanted) == expected


def test_regions_before_are_whole_and_regions_behind_untouched() -> None:
    at = progress(5, {"east": 4, "west": 20})
    assert (at.quota("east"), at.quota("west"), at.is_complete("east"), at.is_complete("west")) == (4, 2, True, False)
    assert progress(2, {"east": 4, "west": 20}).quota("west") == 0


def test_a_stage_counts_what_is_wanted_now() -> None:
    assert [progress(2, {"east": cells}).quota("east") for cells in (4, 20, 100)] == [1, 5, 25]


def test_the_way_back_leads_every_region_to_the_old_version_at_once() -> None:
    at = progress(2, {"east": 4, "west": 3}, RolloutState.ROLLING_BACK)
    assert (at.goal, at.quota("east"), at.quota("west")) == ("v1", 4, 3)


def test_a_region_that_the_deployment_got_meanwhile_comes_last() -> None:
    at = progress(0, {"east": 1, "west": 1, "asia": 1})
    assert at.regions == ("east", "west", "asia")
    assert at.stages[-1].region == "asia"


def test_the_way_back_of_a_surge_needs_no_spare_unless_nothing_may_be_away() -> None:
    at = progress(0, {"east": 4}, RolloutState.ROLLING_BACK)
    surge = structs.replace(POLICY, strategy=UpdateStrategy.SURGE, surge=1)
    assert not replace(at, rollout=replace(at.rollout, policy=surge)).is_surging
    assert replace(at, rollout=replace(at.rollout, policy=structs.replace(surge, max_unavailable=0))).is_surging


def test_a_deployment_that_should_be_nowhere_has_no_course() -> None:
    nowhere = DeploymentView("llama", KIND, 2, {})
    rollout = replace(progress(0, {}).rollout, region_order=())
    assert progress_of(nowhere, rollout) is None
    assert progress_of(nowhere, None) is None


def test_a_preview_says_the_stages_and_the_least_time() -> None:
    stages = preview_stages(POLICY, {"east": 2, "west": 1}, ("east", "west"))
    assert [(stage.label, stage.cells, stage.of) for stage in stages] == [
        ("east canary", 1, 2),
        ("east 100 %", 2, 2),
        ("west 10 %", 1, 1),
    ]
    assert preview_seconds(POLICY, stages) == 3 * (60 + 300)


def test_regions_with_cells_take_their_turn_first() -> None:
    assert order_of_regions({"west": 1, "east": 0, "asia": 2}, ["east", "west", "asia"]) == ("west", "asia", "east")


def test_the_only_cell_cannot_be_updated_in_place() -> None:
    assert "use the strategy surge" in objection(POLICY, {"east": 1})
    assert objection(POLICY, {"east": 1, "west": 1}) == ""


def test_the_only_cell_that_answers_cannot_be_updated_in_place_either() -> None:
    assert "surge 2 to start a pair" in objection(POLICY, {"east": 3}, {"east": RoleSplit(prefill=2, decode=1)})
    assert objection(POLICY, {"east": 3}, {"east": RoleSplit(prefill=1, decode=2)}) == ""


def test_the_canary_is_a_pair_where_roles_are_apart() -> None:
    stages = preview_stages(POLICY, {"east": 8}, ("east",), {"east": RoleSplit(prefill=2, decode=6)})
    assert stages[0].cells == 2
