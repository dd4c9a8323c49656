"""What the fleet carries at a multiple of its forecast load and without regions, as it is or as documents leave it.
Reads only; the page What if, plan drafts, the API and the command line show the same."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import floor, isfinite
from urllib.parse import urlencode

from django.http import QueryDict

from controlplane.forecast_budget import require_time
from controlplane.what_if import HasTime, plan_lost_region
from fleet.reconcile.planning.snapshot import FleetView
from kernel.refusals import InvalidInput
from simulator.prediction import Forecast
from traffic.region_shares.planning.losses import (
    HIGHEST_FACTOR,
    ExpectedDeployment,
    Stress,
    first_to_break,
    plan_stress,
)
from traffic.region_shares.selectors.expected_load import ExpectedLoad, expected_load

LEAST_FACTOR, MOST_FACTOR = 0.5, 4.0
"""Multiples that the slider offers."""
UNKNOWN_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Question:
    """Which load and which losses. `simulate`: a region whose loss is simulated step by step, or ""."""

    factor: float = 1.0
    lost: tuple[str, ...] = ()
    simulate: str = ""

    @property
    def query(self) -> str:
        """Without the simulation, for links."""
        return urlencode([("factor", f"{self.factor:.1f}"), *(("lost", region) for region in self.lost)])


def question_of(query: QueryDict) -> Question:
    """From a URL. An invalid factor is 1, others are brought into their range."""
    try:
        number = float(query.get("factor") or 1)
    except ValueError:
        number = 1.0
    within = min(MOST_FACTOR, max(LEAST_FACTOR, number)) if isfinite(number) else 1.0
    return Question(within, tuple(query.getlist("lost")), query.get("simulate", "").strip())


@dataclass(frozen=True, slots=True)
class StressRow:
    """`held_until`: what the deployment carries in the present fleet, None if documents do not change the fleet."""

    stress: Stress
    held_until: float | None = None

    @property
    def holds(self) -> str:
        return multiple_text(self.stress.holds_until)

    @property
    def held(self) -> str:
        return "\u2013" if self.held_until is None else multiple_text(self.held_until)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer; the first deployment to break comes first. `is_draft`: of the fleet as documents would leave it.
    `forecast`: what the planners would do if `simulated` were lost."""

    question: Question
    regions: tuple[str, ...]
    rows: tuple[StressRow, ...]
    unknown: tuple[str, ...]
    is_judged: bool
    is_draft: bool = False
    held_until: float | None = None
    simulated: str = ""
    forecast: Forecast | None = None
    highest: float = HIGHEST_FACTOR

    @property
    def holds_until(self) -> float | None:
        """Multiple of the forecast that every deployment carries; None without a forecast."""
        return self.rows[0].stress.holds_until if self.rows else None

    @property
    def headline(self) -> str:
        if not self.rows:
            return ""
        without = f" without {' and '.join(self.question.lost)}" if self.question.lost else ""
        first = self.rows[0].stress
        if first.holds_until >= self.highest:
            return f"every deployment carries {self.highest:.0f} times the forecast of the next day{without}"
        holds = f"the fleet{without} holds until {multiple_text(first.holds_until)} the forecast of the next day"
        if self.held_until is not None and multiple_text(self.held_until) != multiple_text(first.holds_until):
            holds += f" (now {multiple_text(self.held_until)})"
        return f"{holds}; first to break: TTFT of {first.deployment} in {first.first} at {first.at:%H:%M} UTC"

    @property
    def unknown_text(self) -> str:
        names = ", ".join(self.unknown[:UNKNOWN_SHOWN])
        more = len(self.unknown) - UNKNOWN_SHOWN
        return f"{names} and {more} more" if more > 0 else names


def multiple_text(factor: float) -> str:
    """Rounded down, because the next step may break."""
    return f"{HIGHEST_FACTOR:.0f}x and more" if factor >= HIGHEST_FACTOR else f"{floor(10 * factor) / 10:.1f}x"


def what_if(
    question: Question,
    *,
    now: datetime,
    has_time: HasTime,
    after: ExpectedLoad | None = None,
    fleet_after: Callable[[], FleetView | None] = lambda: None,
) -> WhatIf:
    """Answers a question about the present fleet, or about the fleet as documents would leave it: `after` is its load,
    and `fleet_after` reads its snapshot if the question needs it. Unknown lost regions are left out. Raises
    InvalidInput for an unknown region to simulate, or without enough time."""
    present = expected_load(now)
    shown = after or present
    chosen = replace(question, lost=tuple(region for region in shown.regions if region in question.lost))
    rows = _stressed(shown, shown.deployments, chosen, has_time)
    held: dict[str, float] = {}
    if after is not None:
        changed = [one for one in present.deployments if one not in after.deployments]
        held = {row.deployment: row.holds_until for row in (*rows, *_stressed(present, changed, chosen, has_time))}
    answer = WhatIf(
        chosen,
        shown.regions,
        tuple(StressRow(row, held.get(row.deployment)) for row in rows),
        shown.unknown,
        shown.is_judged,
        is_draft=after is not None,
        held_until=min(held.values(), default=None),
    )
    if not chosen.simulate:
        return answer
    check_regions([chosen.simulate], answer.regions, "simulate")
    forecast = plan_lost_region(region=chosen.simulate, now=now, has_time=has_time, after=fleet_after())
    return replace(answer, simulated=chosen.simulate, forecast=forecast)


def _stressed(
    load: ExpectedLoad, deployments: Sequence[ExpectedDeployment], question: Question, has_time: HasTime
) -> list[Stress]:
    """As `plan_stress`. Checks the time after each deployment."""
    rows: list[Stress] = []
    for one in deployments:
        rows += plan_stress([one], load.latency_ms, factor=question.factor, lost=question.lost)
        require_time(has_time, "factor", f"a what-if of {len(deployments)} deployments")
    return sorted(rows, key=first_to_break)


def check_regions(named: Iterable[str], known: Collection[str], field: str) -> None:
    """Raises InvalidInput for the first unknown region."""
    if unknown := [region for region in named if region not in known]:
        message = f"there is no region {unknown[0][:80]!r}; there are: {', '.join(known) or 'none'}"
        raise InvalidInput(field=field, rule="exists", message=message)
