"""Planned changes and operators' actions on real rows."""

from typing import Any

import pytest

from fleet.deployments.models import Deployment
from fleet.load.planner import CellCounters
from fleet.reconcile.planning.decisions import ChangeRollout
from fleet.reconcile.planning.snapshot import FailedStart, Finding, Verdict
from fleet.reconcile.planning.states import RolloutState
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import rollout_view
from fleet.rollouts.services import (
    rollout_abort,
    rollout_change,
    rollout_pause,
    rollout_propose,
    rollout_resume,
    rollout_roll_back,
    rollout_skip_bake,
    rollout_start,
)
from fleet.webhooks.models import WebhookDelivery
from fleet.webhooks.services import webhook_create
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from kernel.transitions import StaleDecision
from models_registry.versions.models import Model, ModelVersion, VersionState
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

RUNNING, BAKING, PAUSED = RolloutState.RUNNING, RolloutState.BAKING, RolloutState.PAUSED


@pytest.fixture(autouse=True)
def deployment() -> Deployment:
    rows.version("2", state=VersionState.RELEASED)
    rows.deployment(cells=2, where="us-west-2")
    return rows.deployment(cells=4)


def start(version: str = "sim-70b@2", **policy: Any) -> Rollout:
    proposal = rollout_propose(deployment="sim-70b", version=version, policy=policy, allow_unreleased=True)
    return rollout_start(proposal=proposal, actor="ada", now=NOW, why="faster")


def change(rollout: Rollout, to: RolloutState, **changes: Any) -> None:
    rollout.refresh_from_db()
    values = {"stage": rollout.stage, "reason": "because", **changes}
    rollout_change(ChangeRollout(rollout.pk, RolloutState(rollout.state), rollout.revision, to, **values), now=NOW)
    rollout.refresh_from_db()


def act(service: Any, rollout: Rollout, **more: Any) -> None:
    service(rollout_id=rollout.pk, actor="ada", now=NOW, **more)
    rollout.refresh_from_db()


def test_a_rollout_starts_with_its_own_copy_of_the_policy_and_the_order_of_regions() -> None:
    Deployment.objects.update(update_policy={"bake_s": 30})
    rollout = start(max_unavailable=2)
    assert (rollout.from_version.reference, rollout.to_version.reference) == ("sim-70b@1", "sim-70b@2")
    assert (rollout.policy["bake_s"], rollout.policy["max_unavailable"]) == (30.0, 2)
    assert rollout.region_order == ["us-east-1", "us-west-2"]
    event = Event.objects.get()
    assert (event.kind, event.actor, event.detail["to"]) == ("rollout.running", "ada", "sim-70b@2")


def test_a_newer_rollout_supersedes_the_older_which_stays_the_way_back() -> None:
    rows.version("3")
    older, newer = start(), start("sim-70b@3")
    older.refresh_from_db()
    assert (older.state, older.reason) == ("failed", f"superseded by rollout {newer.pk}")
    assert newer.from_version.reference == "sim-70b@1"


@pytest.mark.parametrize(
    ("arguments", "field", "rule"),
    [
        ({"deployment": "llama"}, "deployment", "exists"),
        ({"version": "sim-70b@9"}, "version", "exists"),
        ({"version": "other@1"}, "version", "same_model"),
        ({"version": "sim-70b@draft"}, "version", "released"),
        ({"version": "sim-70b@retired"}, "version", "released"),
        ({"version": "sim-70b@elsewhere"}, "version", "runs_there"),
        ({"policy": {"bake_s": -1}}, "policy.bake_s", "policy"),
    ],
)
def test_what_cannot_be_rolled_out_is_refused_by_name(arguments: dict[str, Any], field: str, rule: str) -> None:
    rows.version("draft", state=VersionState.DRAFT)
    rows.version("retired", state=VersionState.RETIRED)
    rows.version("elsewhere", state=VersionState.RELEASED, parallelism={"trn1.32xlarge": {"nodes": 1}})
    other = Model.objects.create(name="other", created_at=NOW)
    ModelVersion.objects.create(model=other, version="1", engine="sim", created_at=NOW)
    with pytest.raises(InvalidInput) as refused:
        rollout_propose(**{"deployment": "sim-70b", "version": "sim-70b@2", "policy": {}, **arguments})
    assert (refused.value.field, refused.value.rule) == (field, rule)


def test_a_version_that_every_cell_runs_is_no_rollout() -> None:
    rows.cell("a")
    with pytest.raises(Conflict, match="every cell of sim-70b runs sim-70b@1 already"):
        start("sim-70b@1")
    rows.cell("b", model_version=rows.version("2"))
    assert start("sim-70b@1").state == RUNNING


def test_a_change_that_saw_something_else_is_stale() -> None:
    rollout = start()
    stale = ChangeRollout(rollout.pk, RUNNING, rollout.revision, BAKING, 0, "bake")
    act(rollout_pause, rollout)
    with pytest.raises(StaleDecision):
        rollout_change(stale, now=NOW)
    rollout.refresh_from_db()
    assert rollout.state == PAUSED


def test_what_is_stored_is_what_planners_read_back() -> None:
    rollout = start()
    counters = {"a": CellCounters(3, 10, 1, {60: 4, 61: 6}, {40: 99})}
    failed = (FailedStart("a", 2, "killed"),)
    verdict = Verdict(Finding.PASSED, "fine", {"requests": 10})
    change(rollout, BAKING, failed=failed, counters=counters, verdict=verdict)
    view = rollout_view(rollout)
    assert (view.counters, view.failed, view.state) == (counters, failed, BAKING)
    assert rollout.verdict == {"finding": "passed", "reason": "fine", "numbers": {"requests": 10}}


def test_a_new_reason_alone_starts_no_new_state() -> None:
    rollout = start()
    before = (rollout.state_since, Event.objects.count())
    change(rollout, RUNNING, reason="1 of 2 updated")
    assert (rollout.state_since, Event.objects.count()) == before
    assert rollout.reason == "1 of 2 updated"


def test_success_makes_the_version_the_deployments_own(deployment: Deployment) -> None:
    rollout = start()
    change(rollout, RolloutState.SUCCEEDED)
    deployment.refresh_from_db()
    assert deployment.model_version.reference == "sim-70b@2"
    assert rollout.ended_at == NOW


def test_a_change_that_is_not_allowed_is_refused() -> None:
    rollout = start()
    change(rollout, RolloutState.ROLLING_BACK)
    with pytest.raises(ValueError, match="cannot go from rolling_back to running"):
        change(rollout, RUNNING)


def test_a_pause_by_the_planner_is_announced_once_and_one_by_a_person_never() -> None:
    webhook_create(name="pager", url="https://p.example/x", events=["decision.needed"], actor="ann", now=NOW)
    rollout = start()
    act(rollout_pause, rollout)
    act(rollout_resume, rollout)
    change(rollout, PAUSED, reason="2 cells failed")
    change(rollout, PAUSED, reason="3 cells failed")
    sent = WebhookDelivery.objects.get()
    assert (sent.event, sent.body["waiting"], sent.body["reason"]) == ("decision.needed", "rollout", "2 cells failed")


def test_a_rollout_is_paused_and_resumed_with_the_operators_words() -> None:
    rollout = start()
    act(rollout_pause, rollout, why="lunch")
    assert (rollout.state, rollout.reason) == ("paused", "pause requested by ada: lunch")
    act(rollout_resume, rollout)
    assert rollout.state == RUNNING


@pytest.mark.parametrize("state", [RUNNING, BAKING, PAUSED])
def test_the_way_back_is_open_from_every_state_on_the_way(state: RolloutState) -> None:
    rollout = start()
    Rollout.objects.update(state=state.value)
    act(rollout_roll_back, rollout)
    assert rollout.state == RolloutState.ROLLING_BACK


@pytest.mark.parametrize("service", [rollout_pause, rollout_resume, rollout_roll_back, rollout_abort])
def test_nothing_can_be_asked_of_a_rollout_that_has_ended(service: Any) -> None:
    rollout = start()
    act(rollout_abort, rollout, why="wrong one")
    assert (rollout.state, rollout.ended_at) == (RolloutState.FAILED, NOW)
    with pytest.raises(Conflict, match="is failed"):
        act(service, rollout)


def test_a_bake_is_skipped_to_the_next_stage_and_the_last_one_to_the_end() -> None:
    rollout = start()
    change(rollout, BAKING)
    act(rollout_skip_bake, rollout, why="known good")
    assert (rollout.state, rollout.stage) == (RUNNING, 3)
    Rollout.objects.update(state=BAKING.value, stage=8)
    act(rollout_skip_bake, rollout, why="known good")
    assert rollout.state == RolloutState.SUCCEEDED


def test_a_bake_is_skipped_only_with_a_reason_and_only_while_something_bakes() -> None:
    rollout = start()
    with pytest.raises(InvalidInput, match="Give a reason"):
        act(rollout_skip_bake, rollout, why=" ")
    with pytest.raises(Conflict, match="needs one that is baking or paused"):
        act(rollout_skip_bake, rollout, why="known good")
