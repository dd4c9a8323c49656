"""Deployments with a range, simulated over time."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from fleet.autoscaling.planning.needs import NeedSample, PlaceDecision, PlaceLoad, ScaledPlace, ScalingView
from fleet.autoscaling.planning.planner import plan_scaling
from fleet.autoscaling.planning.policy import CellRange, ScalingMode, ScalingPolicy

NOW = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
PER_CELL = 10.0
EAST = "us-east-1"
ACTING = ScalingPolicy(mode=ScalingMode.ACT)


def place(region: str = EAST, **changes: Any) -> ScaledPlace:
    """Two healthy cells of one to twenty, idle for long."""
    load = changes.pop("load", PlaceLoad(0.0))
    known: dict[str, Any] = {"range": CellRange(1, 20), "current": 2, "ready_for_s": 3600.0, "load": load}
    known |= changes
    return ScaledPlace(region, ready=known.pop("ready", known["current"]), **known)


def view(*places: ScaledPlace, policy: ScalingPolicy = ACTING, **changes: Any) -> ScalingView:
    known: dict[str, Any] = {"per_cell": PER_CELL, "utilisation_cap": 0.8, "start_up_s": 120.0, **changes}
    return ScalingView("chat", policy, places=places or (place(),), **known)


def decide(scaled: ScalingView, now: datetime = NOW) -> PlaceDecision:
    """The decision for its only place."""
    (decision,) = plan_scaling(scaled, now)
    return decision


def agreed(cells: int, seconds: float = 600.0) -> tuple[NeedSample, ...]:
    """This number of cells was always enough until now."""
    return tuple(NeedSample(NOW - timedelta(seconds=ago), cells) for ago in range(int(seconds), 0, -10))


def course(scaled: ScalingView, loads: Iterable[PlaceLoad | None], *, every_s: float = 5.0) -> list[PlaceDecision]:
    """Decisions of consecutive checks, each carried out immediately."""
    decisions = []
    (there,) = scaled.places
    for number, load in enumerate(loads):
        at = NOW + timedelta(seconds=number * every_s)
        decision = decide(replace(scaled, places=(replace(there, load=load),)), at)
        decisions.append(decision)
        there = replace(there, current=decision.wanted, ready=decision.wanted, history=decision.history)
    return decisions


def wanted_over(scaled: ScalingView, load: Callable[[float], float], seconds: float) -> list[int]:
    """Target cells per check for a load by the second."""
    looks = [PlaceLoad(load(number * 5.0)) for number in range(int(seconds / 5))]
    return [decision.wanted for decision in course(scaled, looks)]


def turns(numbers: list[int]) -> int:
    """Number of changes of direction."""
    steps = [after - before for before, after in pairwise(numbers) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(steps))
