"""The autoscaler as a recorded loop: the places of the deployments that it scaled in a pass, why, and the other needs.
Another setting is a field of the deployments' scaling policies. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any

from fleet.autoscaling.planning.needs import ScaledPlace, ScalingRule, ScalingView, all_needs, cells_text, target_of
from fleet.autoscaling.planning.planner import agreement_s, plan_scaling, view_now
from fleet.autoscaling.planning.policy import ScalingPolicy, parse_scaling_policy
from fleet.recorder.planning.changes import policy_changed, policy_names
from fleet.recorder.planning.loops import Decided, NoSettings, RecordedLoop, Round
from fleet.recorder.planning.reasons import (
    ALTERNATIVES_MOST,
    Alternative,
    Reason,
    Subject,
    subjects_bounded,
    text_bounded,
    values_bounded,
)

NAME = "autoscaler"


@dataclass(frozen=True, slots=True)
class ScaledFleet:
    """Input of a pass: the deployments for which it decided something. `acting`: those whose cells follow; the others
    are in shadow mode."""

    deployments: Mapping[str, ScalingView]
    acting: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SetCells:
    """Another number of cells in a place. `acts`: it was to be carried out."""

    deployment: str
    region: str
    was: int
    wanted: int
    rule: ScalingRule
    reason: str
    acts: bool


def plan_cells(fleet: ScaledFleet, _: NoSettings, now: datetime) -> tuple[SetCells, ...]:
    """The changed numbers of cells of `plan_scaling`."""
    return tuple(one for name, view in fleet.deployments.items() for one in _changes(view, name in fleet.acting, now))


def _changes(view: ScalingView, acts: bool, now: datetime) -> Iterator[SetCells]:
    before = {place.region: place.current for place in view.places}
    for one in plan_scaling(view, now):
        was = before[one.region]
        if one.wanted != was:
            yield SetCells(view.deployment, one.region, was, one.wanted, one.rule, one.reason, acts)


def round_of(fleet: ScaledFleet, decisions: tuple[SetCells, ...], applied: tuple[bool, ...], now: datetime) -> Round:
    return Round(fleet, NoSettings(), now, (Decided(plan_cells.__name__, decisions, applied),))


def _explain(one: Round) -> Callable[[Any, str], Reason]:
    return lambda decision, planner: _reason(one.view, decision, planner)


def _reason(fleet: ScaledFleet, decision: SetCells, planner: str) -> Reason:
    view, place = _place(fleet, decision)
    about = (Subject.DEPLOYMENT.named(decision.deployment), Subject.REGION.named(decision.region))
    shadow = "" if decision.acts else "; not carried out, because it is in shadow mode or paused"
    load = asdict(place.load) if place.load else {}
    return Reason(
        SetCells.__name__,
        planner,
        subjects_bounded(about),
        decision.rule.value,
        text_bounded(f"{decision.was} to {decision.wanted} cells in {decision.region}: {decision.reason}{shadow}"),
        values_bounded(
            {"cells": decision.was, "ready": place.ready, "per_cell": view.at(place).per_cell}
            | {name: value for name, value in load.items() if value}
        ),
        values_bounded(_limits(view, place)),
    )


def _place(fleet: ScaledFleet, decision: SetCells) -> tuple[ScalingView, ScaledPlace]:
    view = fleet.deployments[decision.deployment]
    return view, next(place for place in view.places if place.region == decision.region)


def _limits(view: ScalingView, place: ScaledPlace) -> dict[str, Any]:
    policy = view.policy
    return {
        "range": str(place.range),
        "target_utilisation": round(target_of(view), 3),
        "autopilot_cap": view.utilisation_cap,
        "slo_burn": policy.slo_burn,
        "itl_p95_ms": policy.itl_p95_ms,
        "enough_for_s": agreement_s(view),
        "idle_s": policy.idle_s if place.range.min == 0 else None,
        "budget_per_hour": policy.budget_per_hour,
    }


def _alternatives(one: Round, decision: SetCells) -> tuple[Alternative, ...]:
    """What each rule asked for."""
    deployments = {decision.deployment: view_now(one.view.deployments[decision.deployment], one.now)}
    view, place = _place(ScaledFleet(deployments), decision)
    asked = (
        Alternative(f"{cells_text(need.cells)} by {need.rule.value}", _why_not(need.cells, decision, need.reason))
        for need in all_needs(view.at(place), place, one.now)
        if need.cells != decision.wanted
    )
    return tuple(islice(asked, ALTERNATIVES_MOST))


def _why_not(cells: int, decision: SetCells, reason: str) -> str:
    return f"{reason}; " + ("another rule asks for more" if cells < decision.wanted else "a limit allows fewer")


def _parse(stated: Mapping[str, Any], base: ScalingPolicy) -> ScalingPolicy:
    return parse_scaling_policy(stated, base)


def _change(one: Round, changes: Mapping[str, str]) -> Round:
    views = {
        name: replace(view, policy=policy_changed(view.policy, changes, _parse, loop=NAME))
        for name, view in one.view.deployments.items()
    }
    return replace(one, view=replace(one.view, deployments=views))


AUTOSCALER = RecordedLoop(
    name=NAME,
    view=ScaledFleet,
    settings=NoSettings,
    decisions=(SetCells,),
    planners=(plan_cells,),
    explain=_explain,
    check=lambda changes: policy_changed(ScalingPolicy(), changes, _parse, loop=NAME),
    change=_change,
    alternatives=_alternatives,
    with_choices=frozenset({SetCells.__name__}),
    setting_names=lambda: policy_names(ScalingPolicy),
)
