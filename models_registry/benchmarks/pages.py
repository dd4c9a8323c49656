"""The list of benchmarks, and those of a model for its page: tokens per second and chip against tokens per second and
user, at every rate that held, with the Pareto set. Compares versions only within one workload and objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q

from controlplane.dashboard.charts import BY_PLACE, HEIGHT_PX, MOST_SERIES, Colour, figure_json
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint, ConfigurationSearch
from models_registry.benchmarks.planning.goodput import PointVerdict
from models_registry.benchmarks.planning.measurements import Aim, best_configuration, pareto_set
from models_registry.benchmarks.planning.workload import BenchmarkState
from models_registry.benchmarks.selectors import (
    CandidateRow,
    benchmarks_described,
    candidate_rows,
    measured_of,
    searches_described,
    whole_benchmarks,
)
from models_registry.versions.planning.lifecycle import choices

SHOWN = 60
"""Newest benchmarks of a model that are read."""
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
    uses = tuple(dict.fromkeys(map(_use, rows)))
    chosen = use if use in uses else next(iter(uses), "")
    shown = tuple(row for row in rows if _use(row) == chosen)
    best = best_configuration(filter(None, map(measured_of, shown)), Aim.GOODPUT)
    said = f"{best.chosen.text}: {best.reason}" if best else ""
    return BenchmarksView(model, uses, chosen, _points(shown), shown, said)


def _use(row: Benchmark) -> str:
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


LISTED = 100


@dataclass(frozen=True, slots=True)
class BenchmarkList:
    rows: tuple[Benchmark, ...]
    more: bool
    filtered: bool
    page: int


def benchmark_list(*, state: str = "", text: str = "", page: int = 1) -> BenchmarkList:
    """Benchmarks of all models, newest first, in pages from 1. One query."""
    rows = Benchmark.objects.select_related("version").order_by("-id")
    if state:
        rows = rows.filter(state=state)
    if text:
        rows = rows.filter(Q(version__model__name__icontains=text) | Q(deployment__icontains=text))
    fetched = tuple(rows[(page - 1) * LISTED : page * LISTED + 1])
    return BenchmarkList(fetched[:LISTED], len(fetched) > LISTED, bool(state or text), page)


def _list(request: PageRequest) -> BenchmarkList:
    return benchmark_list(state=request.text("state"), text=request.text("q"), page=request.page)


def _filter(request: PageRequest) -> Filter:
    state = choose_labelled(request, "state", (("", "every state"), *choices(BenchmarkState)))
    return Filter(text_label="Model or deployment", text_name="q", text=request.text("q"), choices=(state,))


BENCHMARKS = Page(
    section="benchmarks",
    title="Benchmarks",
    fragments=(Fragment("benchmarks-table", "", ("benchmarks",), "models_registry/benchmarks/table.html", _list),),
    narrow=_filter,
)
