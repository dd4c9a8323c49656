"""The region autopilot as a recorded loop: the deployments whose shares it changed or began to keep in a pass, why, and
the regions that did not get the requests. Another setting is one of the autopilot's or a field of the deployments'
traffic policies. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, get_args

from fleet.recorder.planning.changes import names_of_settings, policy_changed, policy_names, settings_changed
from fleet.recorder.planning.loops import Decided, RecordedLoop, Round
from fleet.recorder.planning.reasons import (
    ALTERNATIVES_MOST,
    Alternative,
    Reason,
    Subject,
    subjects_bounded,
    text_bounded,
    values_bounded,
)
from traffic.region_shares.planning.autopilot import (
    AutopilotSettings,
    Decision,
    KeepTable,
    RegionView,
    ShiftKind,
    ShiftTraffic,
    TrafficView,
    placement_problem,
    plan_shift,
)
from traffic.region_shares.planning.placement import LEAST_DEMAND, PlacementProblem
from traffic.region_shares.planning.policy import (
    Matrix,
    OverrideView,
    Row,
    TrafficPolicy,
    loads,
    overrides_for,
    parse_traffic_policy,
)

NAME = "autopilot"
REGIONS_MOST = 8
"""Of the regions in a reason: those whose load changes most."""


@dataclass(frozen=True, slots=True)
class SteeredFleet:
    """Input of a pass: the deployments for which it decided something, without what they share: overrides and
    latencies."""

    deployments: Mapping[str, TrafficView]
    overrides: tuple[OverrideView, ...]
    latency_ms: Mapping[tuple[str, str], float]

    def of(self, deployment: str) -> TrafficView:
        return replace(self.deployments[deployment], overrides=self.overrides, latency_ms=self.latency_ms)


def plan_shares(fleet: SteeredFleet, settings: AutopilotSettings, now: datetime) -> tuple[Decision, ...]:
    decided = (plan_shift(fleet.of(name), settings, now) for name in fleet.deployments)
    return tuple(one for one in decided if one is not None)


def round_of(
    views: Mapping[str, TrafficView],
    settings: AutopilotSettings,
    decisions: tuple[Decision, ...],
    applied: tuple[bool, ...],
    now: datetime,
) -> Round:
    """`views` are those of the decisions, at least one."""
    shared = next(iter(views.values()))
    alone = {name: replace(view, overrides=(), latency_ms={}) for name, view in views.items()}
    fleet = SteeredFleet(alone, shared.overrides, shared.latency_ms)
    return Round(fleet, settings, now, (Decided(plan_shares.__name__, decisions, applied),))


# --- why -------------------------------------------------------------------------------------------------------------


def _explain(one: Round) -> Callable[[Any, str], Reason]:
    def reason(decision: Decision, planner: str) -> Reason:
        view = one.view.of(decision.deployment)
        if isinstance(decision, KeepTable):
            return _reason_of_keeping(view, decision, planner, one)
        return _reason_of_shift(view, decision, planner, one)

    return reason


def _reason_of_keeping(view: TrafficView, decision: KeepTable, planner: str, one: Round) -> Reason:
    seen = {f"report of {region.name}": _age_text(region, one.now) for region in view.regions}
    lost = {f"{region.name} lost": f"{region.share_lost:.0%}" for region in view.regions if region.share_lost}
    limits = {"stale_after_s": one.settings.stale_after_s, "fallen_share": one.settings.fallen_share}
    origins = [region.name for region in view.regions]
    return Reason(
        KeepTable.__name__,
        planner,
        subjects_bounded(_subjects(view.deployment, origins)),
        "hold",
        text_bounded(decision.reason),
        values_bounded({**lost, **seen}),
        values_bounded(limits),
    )


def _age_text(region: RegionView, now: datetime) -> str:
    return f"{(now - region.reported_at).total_seconds():.1f} s ago" if region.reported_at else "never"


def _subjects(deployment: str, origins: list[str]) -> Iterator[str]:
    yield from (Subject.SHARE.named(f"{deployment}@{origin}") for origin in origins)
    yield Subject.SHARE.named(deployment)
    yield Subject.DEPLOYMENT.named(deployment)
    yield from map(Subject.REGION.named, origins)


def _reason_of_shift(view: TrafficView, shift: ShiftTraffic, planner: str, one: Round) -> Reason:
    changed = changed_origins(view.in_force, shift.matrix)
    moves = {
        f"from {origin}": f"{share_text(view.in_force.get(origin))} -> {share_text(shift.matrix.get(origin))}"
        for origin in changed[:REGIONS_MOST]
    }
    return Reason(
        ShiftTraffic.__name__,
        planner,
        subjects_bounded(_subjects(view.deployment, changed)),
        shift.kind.value,
        text_bounded(shift.reason),
        values_bounded({"moved": f"{shift.moved:.1%}", **moves, **_loads_text(view, shift.matrix, one.now)}),
        values_bounded(_limits(view.policy, one.settings, shift.kind)),
    )


def changed_origins(before: Matrix, after: Matrix) -> list[str]:
    return [origin for origin in sorted({*before, *after}) if before.get(origin) != after.get(origin)]


def share_text(row: Row | None) -> str:
    shares = sorted((row or {}).items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{region} {share:.0%}" for region, share in shares if share) or "none"


def _loads_text(view: TrafficView, matrix: Matrix, now: datetime) -> dict[str, str]:
    """Concurrent requests before and after, and capacities."""
    task = placement_problem(view, overrides_for(view.deployment, view.overrides, now))
    after = loads(matrix, task.demand)

    def change(region: RegionView) -> float:
        return abs(after.get(region.name, 0.0) - task.places[region.name].carried)

    most = sorted(view.regions, key=lambda region: (-change(region), region.name))[:REGIONS_MOST]
    return {
        region.name: f"{task.places[region.name].carried:.1f} -> {after.get(region.name, 0.0):.1f} of "
        f"{region.capacity_now:g} concurrent requests"
        for region in most
    }


def _limits(policy: TrafficPolicy, settings: AutopilotSettings, kind: ShiftKind) -> dict[str, Any]:
    common = {"utilisation_cap": policy.utilisation_cap}
    if kind is ShiftKind.STEP:
        steps = {"step": settings.step, "step_every_s": settings.step_every_s, "dead_band": settings.dead_band}
        return {**common, **steps, "cost_utilisation": policy.cost_utilisation if policy.cost else None}
    if kind is ShiftKind.RELIEF:
        return {**common, "worth_relief": settings.worth_relief}
    return {**common, "stale_after_s": settings.stale_after_s}


# --- other choices ---------------------------------------------------------------------------------------------------


def _alternatives(one: Round, decision: Decision) -> tuple[Alternative, ...]:
    """Regions that get none of the requests of a changed origin, or less than before."""
    view = one.view.of(decision.deployment)
    if isinstance(decision, KeepTable):
        return ()
    task = placement_problem(view, overrides_for(view.deployment, view.overrides, one.now))
    after = loads(decision.matrix, task.demand)
    found = (
        Alternative(f"{origin} to {region}", why_not(task, origin, region, after))
        for origin in changed_origins(view.in_force, decision.matrix)
        for region in sorted(task.places)
        if not decision.matrix.get(origin, {}).get(region)
    )
    return tuple(islice(found, ALTERNATIVES_MOST))


def why_not(task: PlacementProblem, origin: str, region: str, after: Mapping[str, float]) -> str:
    """Why a region gets no requests of an origin. `after`: the loads that were decided."""
    place, overrides = task.places[region], task.overrides
    if origin in overrides.rows:
        return f"the shares of {origin} are fixed by an override"
    if region in {*overrides.closed, *overrides.emptying}:
        return "it is evacuated"
    if not task.policy.may_serve(origin, region):
        return f"residency keeps requests of {origin} out of it"
    if place.capacity_now <= 0:
        return "it has no healthy cell"
    if place.starts or place.returned:
        return "its cells have just started, and serve requests that arrive there first"
    room = task.cap(region) - after.get(region, 0.0)
    if room <= LEAST_DEMAND:
        cap = f"{task.policy.utilisation_cap:.0%} of {place.capacity_now:g}"
        return f"it is full: {after.get(region, 0.0):.1f} concurrent requests, and its cap is {cap}"
    far = task.latency_ms.get((origin, region))
    return f"nearer regions have room; {f'it is {far:.0f} ms away' if far else 'it is farther'}"


# --- other settings --------------------------------------------------------------------------------------------------


def _parse(stated: Mapping[str, Any], base: TrafficPolicy) -> TrafficPolicy:
    return parse_traffic_policy(stated, base=base)


def _split(changes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Changes of the autopilot's settings, and of policies."""
    known = set(names_of_settings(AutopilotSettings))
    settings = {name: value for name, value in changes.items() if name in known}
    return settings, {name: value for name, value in changes.items() if name not in known}


def _check(changes: Mapping[str, str]) -> None:
    settings, policy = _split(changes)
    settings_changed(AutopilotSettings(), settings)
    policy_changed(TrafficPolicy(), policy, _parse, loop=NAME)


def _change(one: Round, changes: Mapping[str, str]) -> Round:
    settings, policy = _split(changes)
    views = {
        name: replace(view, policy=policy_changed(view.policy, policy, _parse, loop=NAME))
        for name, view in one.view.deployments.items()
    }
    return replace(one, view=replace(one.view, deployments=views), settings=settings_changed(one.settings, settings))


AUTOPILOT = RecordedLoop(
    name=NAME,
    view=SteeredFleet,
    settings=AutopilotSettings,
    decisions=get_args(Decision),
    planners=(plan_shares,),
    explain=_explain,
    check=_check,
    change=_change,
    alternatives=_alternatives,
    with_choices=frozenset({ShiftTraffic.__name__}),
    setting_names=lambda: [*names_of_settings(AutopilotSettings), *policy_names(TrafficPolicy)],
)
