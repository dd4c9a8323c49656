"""Load over time as charts: what users ask, what fails, how long they wait, and how full it is."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboard.charts import Chart, Colour, Series
from fleet.models import Deployment
from fleet.planning.load.slo import Burn, Objective, burns
from fleet.selectors.history import (
    SPANS,
    LoadSeries,
    Point,
    Span,
    deployment_subject,
    load_series,
    seen_in_windows,
    span_named,
)

Value = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True)
class LoadCharts:
    """The charts of one subject over a span; `spans` are those that one can choose."""

    charts: tuple[Chart, ...]
    span: Span
    spans: tuple[Span, ...] = SPANS


@dataclass(frozen=True, slots=True)
class Slo:
    """What users of a deployment may expect, and how its budgets burn."""

    objective: Objective
    burns: tuple[Burn, ...]


def load_charts(subject: str, *, span: str, now: datetime, ttft_objective_ms: float | None = None) -> LoadCharts:
    """Four charts of a subject's load, in one query."""
    chosen = span_named(span)
    load = load_series([subject], chosen, now)[subject]
    return LoadCharts(charts=_charts(load, ttft_objective_ms), span=chosen)


def slo_of(deployment: Deployment, now: datetime) -> Slo:
    """How fast a deployment's budgets burn, in one query."""
    objective = deployment.objective()
    return Slo(objective, burns(objective, seen_in_windows(deployment_subject(deployment.name), now)))


def _charts(load: LoadSeries, ttft_objective_ms: float | None) -> tuple[Chart, ...]:
    def series(name: str, value: Value, colour: Colour | None = None) -> Series:
        return Series(name, [None if point is None else value(point) for point in load.points], colour)

    def chart(name: str, title: str, unit: str, *lines: Series, threshold: float | None = None) -> Chart:
        return Chart(name, title, unit, load.start, load.step_s, lines, threshold=threshold)

    return (
        chart(
            "rate",
            "Requests",
            "/s",
            series("requests", lambda point: point.requests_per_s),
            series("errors", lambda point: point.errors_per_s, Colour.BAD),
        ),
        chart(
            "ttft",
            "Time to first token",
            "ms",
            series("median", lambda point: point.ttft_p50_ms),
            series("p95", lambda point: point.ttft_p95_ms),
            threshold=ttft_objective_ms,
        ),
        chart(
            "itl",
            "Time between tokens",
            "ms",
            series("median", lambda point: point.itl_p50_ms),
            series("p95", lambda point: point.itl_p95_ms),
        ),
        chart(
            "fullness",
            "In flight",
            "requests",
            series("in flight", lambda point: point.in_flight),
            series("queued", lambda point: point.queued, Colour.WARN),
        ),
    )
