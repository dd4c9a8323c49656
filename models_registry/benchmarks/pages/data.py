"""Data of the pages of benchmarks: points of a use with their Pareto set, latency charts, comparisons and searches.
Compares versions only within one workload and objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from controlplane.dashboard.charts import BY_PLACE, HEIGHT_PX, MOST_SERIES, Colour, figure_json
from controlplane.dashboard.fragments import found_or_404
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint, ConfigurationSearch
from models_registry.benchmarks.planning.goodput import PointVerdict
from models_registry.benchmarks.planning.measurements import Aim, best_configuration, pareto_set
from models_registry.benchmarks.planning.workload import BenchmarkState
from models_registry.benchmarks.selectors import (
    CandidateRow,
    benchmarks_described,
    candidate_rows,
    figures_at_goodput,
    measured_of,
    searches_described,
    whole_benchmarks,
)

SHOWN = 60
"""Newest benchmarks of a model, or of a use, that are read."""
USES_FROM = 200
"""Newest benchmarks whose uses the list offers."""
MOST_COMPARED = 5
SEARCHES_SHOWN = 3
CONFIGURATIONS_SHOWN = 40


@dataclass(frozen=True, slots=True)
class HeldPoint:
    """One rate that held. `is_best`: no other point is better in both numbers."""

    benchmark: Benchmark
    point: BenchmarkPoint
    per_chip: float
    per_user: float
    is_best: bool


@dataclass(frozen=True, slots=True)
class BenchmarksView:
    """`uses`: workload and objective, newest first; `chosen` is the displayed one. `rows`: its benchmarks in every
    state; `best`: the best with its reason, empty if none held."""

    model: str
    uses: tuple[str, ...]
    chosen: str
    points: tuple[HeldPoint, ...]
    rows: tuple[Benchmark, ...]
    best: str

    @property
    def figure(self) -> str:
        """Plotly figure as JSON: one colour per version, and a line through the best points."""
        versions = list(dict.fromkeys(one.benchmark.version.reference for one in self.points))[: MOST_SERIES - 1]
        traces = [_markers(name, self.points, BY_PLACE[place]) for place, name in enumerate(versions)]
        front = sorted((one for one in self.points if one.is_best), key=lambda one: one.per_user)
        traces.append(_trace("best", front, "lines", line={"color": Colour.IDLE, "width": 1, "dash": "dot"}))
        axes = {
            "xaxis": {"title": {"text": "tokens/s per user"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "tokens/s per chip"}, "rangemode": "tozero"},
        }
        layout = {"height": 2 * HEIGHT_PX, "showlegend": True, "hovermode": "closest", **axes}
        return figure_json(traces, layout)


def model_benchmarks(model: str, use: str) -> BenchmarksView:
    """The requested use, or the newest. Two queries."""
    rows = list(whole_benchmarks(benchmarks_described()).filter(version__model_id=model).order_by("-id")[:SHOWN])
    uses = tuple(dict.fromkeys(map(use_of, rows)))
    chosen = use if use in uses else next(iter(uses), "")
    return _view_of_use(model, uses, chosen, tuple(row for row in rows if use_of(row) == chosen))


def all_benchmarks(use: str) -> BenchmarksView:
    """Benchmarks of all models with the requested use, or else the newest. Three queries."""
    whole = whole_benchmarks(benchmarks_described()).order_by("-id")
    pairs = list(dict.fromkeys(whole.values_list("workload", "slo")[:USES_FROM]))
    by_use = {f"{workload} within {slo}": (workload, slo) for workload, slo in pairs}
    chosen = use if use in by_use else next(iter(by_use), "")
    workload, slo = by_use.get(chosen, ("", ""))
    shown = tuple(whole.filter(workload=workload, slo=slo)[:SHOWN]) if chosen else ()
    return _view_of_use("", tuple(by_use), chosen, shown)


def _view_of_use(model: str, uses: tuple[str, ...], chosen: str, shown: tuple[Benchmark, ...]) -> BenchmarksView:
    best = best_configuration(filter(None, map(measured_of, shown)), Aim.GOODPUT)
    said = f"{best.chosen.text}: {best.reason}" if best else ""
    return BenchmarksView(model, uses, chosen, _points(shown), shown, said)


def use_of(row: Benchmark) -> str:
    return f"{row.workload} within {row.slo}"


def _points(rows: Sequence[Benchmark]) -> tuple[HeldPoint, ...]:
    found = [
        (row, point, float(point.figures["tokens_per_s"]) / max(1, row.chips), float(per_user))
        for row in rows
        for point in row.points.all()
        if point.verdict == PointVerdict.HELD.value and (per_user := point.figures["tokens_per_s_per_user"])
    ]
    front = pareto_set({point.pk: (per_chip, per_user) for _, point, per_chip, per_user in found})
    return tuple(HeldPoint(*one, is_best=one[1].pk in front) for one in found)


def _markers(name: str, points: Sequence[HeldPoint], colour: Colour) -> dict[str, Any]:
    own = [one for one in points if one.benchmark.version.reference == name]
    return _trace(name, own, "markers", marker={"color": colour, "size": 8})


def _trace(name: str, points: Sequence[HeldPoint], mode: str, **style: Any) -> dict[str, Any]:
    return {
        "mode": mode,
        "name": name,
        "x": [round(one.per_user, 3) for one in points],
        "y": [round(one.per_chip, 3) for one in points],
        "hovertemplate": "%{y:,.1f} per chip, %{x:,.1f} per user",
        **style,
    }


@dataclass(frozen=True, slots=True)
class SearchPanel:
    """A search with its configurations, best first; `hidden` counts those beyond the page."""

    search: ConfigurationSearch
    rows: tuple[CandidateRow, ...]
    hidden: int


@dataclass(frozen=True, slots=True)
class SearchesView:
    model: str
    searches: tuple[SearchPanel, ...]


def model_searches(model: str) -> SearchesView:
    """Newest searches around versions of a model, in a constant number of queries."""
    found = searches_described().filter(version__model_id=model).order_by("-id")[:SEARCHES_SHOWN]
    return SearchesView(model, tuple(_search_panel(row) for row in found))


def _search_panel(row: ConfigurationSearch) -> SearchPanel:
    rows = candidate_rows(row)
    return SearchPanel(row, rows[:CONFIGURATIONS_SHOWN], max(0, len(rows) - CONFIGURATIONS_SHOWN))


@dataclass(frozen=True, slots=True)
class LatencyChart:
    """A latency by rate, with its objective."""

    name: str
    title: str
    figure: str


@dataclass(frozen=True, slots=True)
class PointsView:
    """Measured rates of one benchmark, in ascending order."""

    row: Benchmark
    points: tuple[BenchmarkPoint, ...]
    charts: tuple[LatencyChart, ...]


def benchmark_points(row: Benchmark) -> PointsView:
    points, slo = tuple(row.points.all()), row.parsed_slo()
    if not points:
        return PointsView(row, (), ())
    charts = (
        LatencyChart("ttft", "Time to first token", _latency_figure(points, "ttft", slo.ttft_s * 1000)),
        LatencyChart("itl", "Time between tokens", _latency_figure(points, "itl", slo.itl_s * 1000)),
    )
    return PointsView(row, points, charts)


def _latency_figure(points: Sequence[BenchmarkPoint], latency: str, objective_ms: float) -> str:
    """Plotly figure as JSON: median and p99 in milliseconds by requests per second."""
    rates = [point.rate for point in points]
    traces = [
        _latency_trace(name, rates, [point.figures.get(f"{latency}_{name}_ms") for point in points], colour)
        for name, colour in (("p50", Colour.FIRST), ("p99", Colour.SECOND))
    ]
    traces.append(_latency_trace("objective", rates, [objective_ms] * len(rates), Colour.IDLE, dash="dot"))
    layout = {
        "height": HEIGHT_PX,
        "showlegend": True,
        "xaxis": {"title": {"text": "requests/s"}},
        "yaxis": {"rangemode": "tozero"},
    }
    return figure_json(traces, layout)


def _latency_trace(
    name: str, rates: Sequence[float], values: Sequence[float | None], colour: Colour, **line: Any
) -> dict[str, Any]:
    style = {"mode": "lines" if line else "lines+markers", "line": {"color": colour, "width": 1.5, **line}}
    return {
        "type": "scatter",
        "name": name,
        "x": list(rates),
        "y": list(values),
        "hovertemplate": "%{y:,.1f} ms",
        **style,
    }


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """One benchmark of a comparison. `figures`: those at its highest rate that held, empty if none did. `without`: the
    query without it."""

    row: Benchmark
    figures: dict[str, Any]
    per_chip: float | None
    without: str


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """Benchmarks of one use side by side. `others` have the same use and can be added by their query."""

    columns: tuple[ComparedColumn, ...]
    use: str
    refused: str
    others: tuple[tuple[Benchmark, str], ...]


def benchmarks_compared(ids: Sequence[int]) -> ComparisonView:
    """These benchmarks, if they have the same use, and others with it. Raises Http404 if one does not exist. Four
    queries."""
    ids = list(dict.fromkeys(ids))[:MOST_COMPARED]
    found = {row.pk: row for row in benchmarks_described().filter(pk__in=ids)}
    rows = [found_or_404(found.get(pk), f"benchmark {pk}") for pk in ids]
    if not rows:
        return ComparisonView((), "", "", ())
    first = rows[0]
    if other := next((row for row in rows if use_of(row) != use_of(first)), None):
        refused = (
            f"Benchmark {first.pk} measured {use_of(first)}, and benchmark {other.pk} measured {use_of(other)}. Only "
            "benchmarks with the same workload and objective can be compared."
        )
        return ComparisonView((), "", refused, ())
    columns = tuple(_compared_column(row, ids) for row in rows)
    same = whole_benchmarks(Benchmark.objects.select_related("version")).exclude(pk__in=ids)
    others = same.filter(workload=first.workload, slo=first.slo, state=BenchmarkState.DONE.value).order_by("-id")[
        :SHOWN
    ]
    has_room = len(ids) < MOST_COMPARED
    return ComparisonView(
        columns, use_of(first), "", tuple((row, _ids_query([*ids, row.pk])) for row in others) if has_room else ()
    )


def _compared_column(row: Benchmark, ids: Sequence[int]) -> ComparedColumn:
    measured = measured_of(row)
    return ComparedColumn(
        row,
        dict(figures_at_goodput(row) or {}),
        measured.goodput_per_chip if measured else None,
        _ids_query([pk for pk in ids if pk != row.pk]),
    )


def _ids_query(ids: Sequence[int]) -> str:
    return urlencode([("id", pk) for pk in ids])
