"""What-if: the live planners predict the effect of a change from a snapshot, without changing it."""

from dataclasses import replace

from fleet.deployments.planner import QuotaView, SharingPolicy, UpdatePolicy
from fleet.reconcile.planning.settings import LedgerLimits
from fleet.reconcile.planning.snapshot import FleetView, RolloutView, VersionView
from fleet.reconcile.planning.states import RolloutState
from simulator.clock import EPOCH
from simulator.fleet_slice import limits_as_floors, without_other_deployments, without_other_regions
from simulator.fleet_spec import KIND, DeploymentSpec, FleetSpec, build_fleet
from simulator.prediction import POLL_EVERY_S, Change, Forecast, LoseRegion, RollOut, Scale, predict

POLICY = UpdatePolicy(canary_bake_s=20.0, bake_s=20.0, min_healthy_s=10.0)
SHAPE = FleetSpec((DeploymentSpec("llama", {"east": 3, "west": 2}, policy=POLICY),), spares=2)


def forecast(change: Change, shape: FleetSpec = SHAPE) -> Forecast:
    return predict(build_fleet(shape), change, EPOCH, load_s={"v1": 20.0, "v2": 30.0})


def ready(found: Forecast) -> dict[str, tuple[int, int, int]]:
    return {place.region: (place.ready_now, place.ready_least, place.ready_then) for place in found.places}


def test_a_rollout_in_place_takes_one_cell_down_at_a_time_and_ends() -> None:
    found = forecast(RollOut("llama", "v2", POLICY, VersionView(2)))

    assert found.took_s is not None
    assert 5 * 40.0 < found.took_s < 1000.0
    assert ready(found) == {"east": (3, 2, 3), "west": (2, 1, 2)}
    assert all(0.0 < place.least_at_s < found.took_s for place in found.places)
    assert [step.kind for step in found.steps][-1] == "rollout.succeeded"
    assert found.machines_launched == 0
    assert found.warnings == ()


def test_a_scaling_within_the_spares_says_when_the_cell_would_serve() -> None:
    found = forecast(Scale("llama", {"east": 4}))

    assert ready(found)["east"] == (3, 3, 4)
    assert {place.least_at_s for place in found.places} == {0.0}
    assert found.took_s is not None
    assert 20.0 < found.took_s < 60.0
    assert [step.kind for step in found.steps[:2]] == ["cell.pending", "cell.starting"]


def test_a_scaling_beyond_the_spares_says_how_many_machines_it_would_launch() -> None:
    found = forecast(Scale("llama", {"east": 6}))

    assert ready(found)["east"] == (3, 3, 6)
    assert found.machines_launched >= 4
    assert f"{found.machines_launched} machines would be launched" in found.warnings


def test_a_forecast_without_time_ends_between_two_events_and_says_how_far_it_looked() -> None:
    calls = 0

    def has_time() -> bool:
        nonlocal calls
        calls += 1
        return calls <= 50

    change = Scale("llama", {"east": 300, "west": 300})
    found = predict(build_fleet(SHAPE), change, EPOCH, load_s={"v1": 20.0}, has_time=has_time)
    assert calls == 51, "it is asked before each event, and once says no"
    assert 0 < found.looked_s < POLL_EVERY_S
    assert found.took_s is None
    assert f"not over within {found.looked_s:.0f} s, the limit of this forecast" in found.warnings
    assert {place.wanted for place in found.places} == {300}


def test_a_lost_region_ends_without_its_cells_and_leaves_the_others_alone() -> None:
    found = forecast(LoseRegion("east"))

    assert ready(found) == {"east": (3, 0, 0), "west": (2, 2, 2)}
    assert "llama in east would have no cell in service for a while" in found.warnings
    assert "llama in east would end with 0 of 3 cells in service" in found.warnings


def test_a_region_is_lost_after_the_changes_that_are_considered_are_over() -> None:
    view = build_fleet(SHAPE)
    llama = view.deployments["llama"]
    after = replace(view, deployments={"llama": replace(llama, cells_wanted={"east": 4, "west": 3})})
    found = predict(after, LoseRegion("east", settled=True), EPOCH, load_s={"v1": 20.0})

    assert ready(found) == {"east": (4, 0, 0), "west": (3, 3, 3)}
    assert all(0.0 <= step.at_s <= found.looked_s for step in found.steps)
    assert found.took_s is not None


def test_the_snapshot_stays_as_it_is() -> None:
    view = build_fleet(SHAPE)
    before = (dict(view.cells), dict(view.nodes), dict(view.rollouts))
    predict(view, Scale("llama", {"east": 1}), EPOCH, load_s={"v1": 5.0})

    assert before == (view.cells, view.nodes, view.rollouts)


def two_deployments(**others: int) -> FleetView:
    shapes = (SHAPE.deployments[0], DeploymentSpec("other", {"east": 2}, policy=POLICY))
    view = build_fleet(FleetSpec(shapes, spares=2))
    other = view.deployments["other"]
    return replace(view, deployments={**view.deployments, "other": replace(other, cells_wanted={"east": 2, **others})})


def test_what_is_at_rest_is_left_out_and_told_as_it_is() -> None:
    view = two_deployments()
    left = without_other_deployments(view, "llama")
    found = predict(view, Scale("llama", {"east": 4}), EPOCH, load_s={"v1": 20.0})

    assert set(left.deployments) == {"llama"}
    assert len(view.nodes) - len(left.nodes) == 4
    assert [(place.deployment, place.region, place.ready_then) for place in found.places] == [
        ("llama", "east", 4),
        ("llama", "west", 2),
        ("other", "east", 2),
    ]


def test_another_deployment_that_wants_machines_too_is_not_left_out() -> None:
    view = two_deployments(east=3)
    found = predict(view, Scale("llama", {"east": 4}), EPOCH, load_s={"v1": 20.0})

    assert without_other_deployments(view, "llama") == view
    assert found.machines_launched >= 4
    assert [place.ready_then for place in found.places] == [4, 2, 3]


def test_a_part_of_a_fleet_keeps_the_budgets_of_the_whole() -> None:
    shapes = tuple(DeploymentSpec(f"model-{number}", {"east": 10, "west": 20}) for number in range(3))
    limits = limits_as_floors(build_fleet(FleetSpec(shapes)), LedgerLimits())

    assert (limits.region(0), limits.fleet(0)) == (3, 9)


def test_the_other_regions_are_left_out_unless_a_rollout_binds_them() -> None:
    view = build_fleet(SHAPE)
    moved = RolloutView(1, "llama", "v1", "v2", RolloutState.RUNNING, 0, ("east", "west"), POLICY, 1, EPOCH)

    assert {node.region for node in without_other_regions(view, "west").nodes.values()} == {"west"}
    assert without_other_regions(replace(view, rollouts={"llama": moved}), "west").nodes == view.nodes


def short_pool(*, team: str = "") -> FleetView:
    """Five machines in a fixed pool: two cells of an urgent deployment, and three of batch."""
    chat = DeploymentSpec(
        "chat", {"east": 2}, size=1, policy=POLICY, floor=9, sharing=SharingPolicy(6, False), team=team
    )
    night = DeploymentSpec("night", {"east": 3}, size=1, policy=POLICY, sharing=SharingPolicy(2, True), team=team)
    return build_fleet(FleetSpec((chat, night), spares=0, pool=0))


def test_what_would_make_room_is_foreseen() -> None:
    found = predict(short_pool(), Scale("chat", {"east": 4}), EPOCH, load_s={"v1": 20.0})

    ends = {place.deployment: (place.ready_now, place.ready_then) for place in found.places}
    assert ends == {"chat": (2, 4), "night": (3, 1)}
    assert [step.subject for step in found.steps if step.kind == "grant.priority"] == ["night", "night"]
    (warning,) = [text for text in found.warnings if text.startswith("night in east may have 1 of 3 cells")]
    assert warning.endswith("make room")


def test_what_no_quota_allows_is_foreseen() -> None:
    view = replace(short_pool(team="search"), quotas=(QuotaView("search", KIND, 5),))
    found = predict(view, Scale("night", {"east": 5}), EPOCH, load_s={"v1": 20.0})

    assert {place.deployment: place.ready_then for place in found.places} == {"chat": 2, "night": 3}
    assert any("night in east may have 3 of 5 cells: team search has 5 of 5" in text for text in found.warnings)
