"""Decisions are carried out, stored, and compared with the actual load."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from fleet.autoscaling.models import ScalingDecision, ScalingState, ScalingSwitch
from fleet.autoscaling.planning.needs import NeedSample, PlaceDecision, ScalingRule
from fleet.autoscaling.planning.policy import CellRange
from fleet.autoscaling.selectors import need_history, ranged_fleet, scaling_switch
from fleet.autoscaling.services import DECISIONS_KEPT, ScalingLook, autoscaling_pause, autoscaling_resume, scaling_apply
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_scale
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db
EAST = "us-east-1"


@pytest.fixture(autouse=True)
def ranged() -> None:
    rows.deployment(cells=2)
    deployment_scale(name="sim-70b", cells={EAST: CellRange(1, 8)}, actor="ada", now=NOW)
    Event.objects.all().delete()


def place() -> DeploymentRegion:
    return DeploymentRegion.objects.select_related("scaling_state").get()


def look(wanted: int, *, needed: int | None = None, acting: bool = True, at: datetime = NOW) -> ScalingLook:
    history = (NeedSample(at, wanted),)
    rule = ScalingRule.UTILISATION
    decision = PlaceDecision(EAST, wanted, wanted if needed is None else needed, rule, "because", history)
    return ScalingLook(place(), acting, decision, {"in_flight": 12.0})


def apply(wanted: int, seconds: float = 0.0, **stated: Any) -> list[str]:
    at = NOW + timedelta(seconds=seconds)
    applied = scaling_apply(looks=[look(wanted, at=at, **stated)], now=at)
    return [one.place.deployment_id for one in applied if one.sets_cells]


def test_a_decision_sets_the_number_that_a_person_sets(django_capture_on_commit_callbacks: Callable[..., Any]) -> None:
    with django_capture_on_commit_callbacks() as callbacks:
        assert apply(5) == ["sim-70b"]
    assert (place().cells, place().range) == (5, CellRange(1, 8))
    event = Event.objects.get()
    assert (event.kind, event.actor, event.region) == ("deployment.scaled", "autoscaler", EAST)
    assert event.message == "sim-70b in us-east-1 from 2 to 5 cells, by load within 1 to 8: because"
    assert event.detail == {"was": 2, "cells": 5, "rule": "utilisation"}
    decision = ScalingDecision.objects.get()
    assert (decision.was, decision.wanted, decision.acted, decision.reason) == (2, 5, True, "because")
    assert callbacks, "the reconciler is woken"


def test_what_changes_nothing_is_a_look_and_no_decision() -> None:
    assert apply(2) == []
    assert not ScalingDecision.objects.exists()
    assert not Event.objects.exists()
    state = ScalingState.objects.get()
    assert (state.wanted, state.rule, state.load) == (2, "utilisation", {"in_flight": 12.0})
    assert need_history(state) == (NeedSample(NOW, 2),)


def test_shadow_decides_against_its_own_last_decision_and_changes_nothing() -> None:
    assert apply(5, acting=False) == []
    assert apply(5, 5.0, acting=False) == []
    assert apply(3, 10.0, acting=False) == []
    assert place().cells == 2
    found = ScalingDecision.objects.order_by("id").values_list("was", "wanted", "acted")
    assert list(found) == [(2, 5, False), (5, 3, False)]
    assert not Event.objects.exists()


def test_what_a_person_changed_meanwhile_is_not_overwritten() -> None:
    seen = look(5)
    deployment_scale(name="sim-70b", cells={EAST: 3}, actor="ada", now=NOW)
    assert scaling_apply(looks=[seen], now=NOW) == []
    assert (place().cells, place().range) == (3, None)
    assert not ScalingDecision.objects.exists()
    assert not ScalingState.objects.exists()


def test_a_decision_is_held_against_the_load_that_came_until_the_next_one() -> None:
    apply(5)
    apply(5, 5.0, needed=7)
    apply(5, 10.0, needed=4)
    apply(6, 15.0)
    apply(6, 20.0, needed=6)
    first, second = ScalingDecision.objects.order_by("id")
    assert (first.observed_s, first.too_few_cell_s, first.too_many_cell_s) == (15.0, 15.0, 5.0)
    assert first.in_force_cell_s == 75.0
    assert (second.observed_s, second.too_few_cell_s, second.in_force_cell_s) == (5.0, 0.0, 30.0)


def test_an_unknown_need_is_no_regret() -> None:
    apply(5)
    unknown = PlaceDecision(EAST, 5, None, ScalingRule.UNKNOWN_LOAD, "silent", ())
    scaling_apply(looks=[ScalingLook(place(), True, unknown, {})], now=NOW + timedelta(seconds=5))
    assert ScalingDecision.objects.get().observed_s == 0.0


def test_of_each_place_so_many_decisions_are_kept() -> None:
    old = ScalingDecision(
        deployment_id="sim-70b", region_id=EAST, at=NOW, was=1, wanted=2, acted=True, rule="min", reason=""
    )
    ScalingDecision.objects.bulk_create([old for _ in range(DECISIONS_KEPT)])
    first = ScalingDecision.objects.earliest("id").pk
    apply(5)
    assert ScalingDecision.objects.count() == DECISIONS_KEPT
    assert not ScalingDecision.objects.filter(pk=first).exists()


def test_a_plain_number_ends_the_range_and_what_was_remembered() -> None:
    apply(5)
    deployment_scale(name="sim-70b", cells={EAST: 5}, actor="ada", now=NOW)
    assert (place().cells, place().range) == (5, None)
    assert not ScalingState.objects.exists()
    message = Event.objects.order_by("-id")[0].message
    assert message == "sim-70b in us-east-1 from 5 to 5 cells, no longer autoscaled within 1 to 8, requested by ada"
    assert ranged_fleet(NOW).deployments == ()


def test_a_range_keeps_the_number_that_there_is_as_far_as_it_may() -> None:
    for stated, cells in ((CellRange(1, 8), 2), (CellRange(4, 8), 4), (CellRange(1, 3), 3)):
        deployment_scale(name="sim-70b", cells={EAST: stated}, actor="ada", now=NOW)
        assert place().cells == cells
    newest = Event.objects.order_by("-id")[0]
    assert newest.message == "sim-70b in us-east-1 from 4 to 3 cells, autoscaled within 1 to 3, requested by ada"
    assert newest.detail == {"was": 4, "cells": 3, "range": {"min": 1, "max": 3}}


def test_the_switch_is_used_once_and_each_use_is_an_event() -> None:
    assert not scaling_switch().paused
    autoscaling_resume(actor="ada", now=NOW)
    assert not ScalingSwitch.objects.exists()
    autoscaling_pause(actor="ada", now=NOW, why="a load test")
    autoscaling_pause(actor="eve", now=NOW)
    assert (scaling_switch().paused, scaling_switch().actor) == (True, "ada")
    assert autoscaling_resume(actor="eve", now=NOW).paused is False
    messages = list(Event.objects.order_by("id").values_list("message", flat=True))
    assert messages == ["autoscaling paused by ada: a load test", "autoscaling resumed by eve"]


def test_a_policy_that_makes_no_sense_is_the_problem_of_its_deployment_alone() -> None:
    Deployment.objects.update(scaling={"mode": "sideways"})
    fleet = ranged_fleet(NOW)
    assert fleet.deployments == ()
    assert "mode is 'sideways'" in fleet.problems["sim-70b"]


def test_a_start_takes_from_the_decision_until_the_cell_is_ready() -> None:
    def start_up_s() -> float:
        return ranged_fleet(NOW).deployments[0].start_up_s

    assert start_up_s() == rows.version().ready_timeout_s / 4, "nobody has seen one"
    for number, took_s in enumerate((40, 90, 50)):
        for kind, at in (("cell.pending", 0), ("cell.starting", 30), ("cell.ready", took_s)):
            moment = NOW + timedelta(seconds=at)
            Event.objects.create(at=moment, kind=kind, message="", deployment="sim-70b", cell=f"c-{number}")
    assert start_up_s() == 50.0
    Deployment.objects.update(scaling={"start_up_s": 7})
    assert start_up_s() == 7.0
