"""Pages of benchmarks: the list with the Pareto chart of a use (workload and objective), one benchmark with its points,
several side by side, and the form that starts one. The page of a model has the same chart. Benchmarks are compared only
within one use. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from controlplane.dashboard.actions import (
    Action,
    ActionMenu,
    ActionPage,
    Confirmation,
    Field,
    Submission,
    Target,
    action_menu,
    action_page_view,
    action_view,
    page_target,
)
from controlplane.dashboard.charts import BY_PLACE, HEIGHT_PX, MOST_SERIES, Colour, figure_json
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from fleet.deployments.models import Deployment
from kernel.refusals import InvalidInput
from models_registry.benchmarks.api import StartBenchmarkSerializer
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint, ConfigurationSearch
from models_registry.benchmarks.planning.goodput import PointVerdict
from models_registry.benchmarks.planning.measurements import Aim, best_configuration, pareto_set
from models_registry.benchmarks.planning.workload import BENCHMARK_OPEN, BenchmarkState
from models_registry.benchmarks.selectors import (
    BenchmarkTarget,
    CandidateRow,
    NoTarget,
    benchmark_target,
    benchmarks_described,
    candidate_rows,
    figures_at_goodput,
    measured_of,
    searches_described,
    whole_benchmarks,
)
from models_registry.benchmarks.services.benchmark import (
    BOUNDS,
    BenchmarkRequest,
    benchmark_cancel,
    benchmark_rules,
    benchmark_start,
    readable_use,
)
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import choices
from models_registry.versions.selectors import version_stated

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
    uses = tuple(dict.fromkeys(map(_use, rows)))
    chosen = use if use in uses else next(iter(uses), "")
    return _view_of_use(model, uses, chosen, tuple(row for row in rows if _use(row) == chosen))


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


def _listed(request: PageRequest) -> "QuerySet[Benchmark]":
    rows, state, text = Benchmark.objects.select_related("version"), request.text("state"), request.text("q")
    if text:
        rows = rows.filter(Q(version__model__name__icontains=text) | Q(deployment__icontains=text))
    return rows.filter(state=state) if state else rows


OF_GOODPUT = "Highest rate of all cells together that held the objective"
VERSION_ORDER = ("version__model__name", "version__version")
BENCHMARK_LIST: List[Benchmark] = List(
    name="benchmarks",
    columns=(
        Column("version", "Version", lambda row: row.version.reference, VERSION_ORDER),
        Column("state", "State", lambda row: row.state, ("state",)),
        Column("deployment", "Deployment", lambda row: row.deployment, ("deployment",), "wide"),
        Column("region", "Region", lambda row: row.region, ("region",), "wide"),
        Column("use", "Workload and objective", _use, ("workload", "slo"), "wide"),
        Column("goodput", "Requests/s", lambda row: row.goodput, ("goodput",), "number", OF_GOODPUT, True),
        Column("chips", "Chips", lambda row: row.chips, ("chips",), "number wide", is_newest_first=True),
        Column("by", "By", lambda row: row.actor, ("actor",), "wide"),
        Column("created", "Created", lambda row: row.created_at, ("created_at",), "number wide", is_newest_first=True),
    ),
    query=_listed,
    rows=lambda benchmarks, now: benchmarks,
    order=("-id",),
    filters=("q", "state"),
)


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
    if other := next((row for row in rows if _use(row) != _use(first)), None):
        refused = (
            f"Benchmark {first.pk} measured {_use(first)}, and benchmark {other.pk} measured {_use(other)}. Only "
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
        columns, _use(first), "", tuple((row, _ids_query([*ids, row.pk])) for row in others) if has_room else ()
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


def _filter(request: PageRequest) -> Filter:
    state = choose_labelled(request, "state", (("", "every state"), *choices(BenchmarkState)))
    return Filter(text_label="Model or deployment", text_name="q", text=request.text("q"), choices=(state,))


def _all_of_use(request: PageRequest) -> BenchmarksView:
    return all_benchmarks(request.text("use"))


BENCHMARKS = Page(
    section="benchmarks",
    title="Benchmarks",
    fragments=(
        Fragment("benchmarks-table", "", ("benchmarks",), "models_registry/benchmarks/table.html", BENCHMARK_LIST.page),
        Fragment(
            "benchmarks-use", "By use", ("benchmarks",), "models_registry/benchmarks/benchmarks.html", _all_of_use
        ),
    ),
    narrow=_filter,
    export=BENCHMARK_LIST.export,
    charts=True,
)


def _benchmark_id(text: str) -> int:
    """The ID in a URL; 0, which no benchmark has, if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


def _described(request: PageRequest) -> Benchmark:
    row = benchmarks_described().filter(pk=_benchmark_id(request.key)).first()
    return found_or_404(row, f"benchmark {request.key!r}")


def _points_of(request: PageRequest) -> PointsView:
    return benchmark_points(request.once(_described))


def _actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_described), request.caller.access, CANCEL)


BENCHMARK = Page(
    section="benchmarks",
    title="",
    fragments=(
        Fragment("benchmark", "", ("benchmarks:{key}",), "models_registry/benchmarks/benchmark.html", _described),
        Fragment(
            "benchmark-points", "Points", ("benchmarks:{key}",), "models_registry/benchmarks/points.html", _points_of
        ),
    ),
    actions=_actions,
    charts=True,
)


def _compared(request: PageRequest) -> ComparisonView:
    return benchmarks_compared([_benchmark_id(text) for text in request.filters.getlist("id")[:MOST_COMPARED]])


BENCHMARK_COMPARISON = Page(
    section="benchmarks",
    title="Compare benchmarks",
    fragments=(
        Fragment("benchmarks-compared", "", ("benchmarks",), "models_registry/benchmarks/compared.html", _compared),
    ),
)


def _cancel(form: Submission, row: Benchmark) -> None:
    benchmark_cancel(benchmark_id=row.pk, actor=form.actor, now=form.now)


TARGET = Target(
    noun="benchmark",
    find=lambda key: found_or_404(
        Benchmark.objects.select_related("version").filter(pk=_benchmark_id(key)).first(), f"benchmark {key!r}"
    ),
    name=lambda row: f"benchmark {row.pk}",
    url=lambda row: reverse("benchmark", args=(row.pk,)),
    deployment=lambda row: row.deployment,
    action_url=lambda row, name: reverse("benchmark-action", args=(row.pk, name)),
)
CANCEL = Action(
    target=TARGET,
    name="cancel",
    label="Cancel",
    run=_cancel,
    effect=lambda row, now: "No further rates are measured. Measured points are kept.",
    why_not=lambda row: "" if BenchmarkState(row.state) in BENCHMARK_OPEN else "This benchmark has ended.",
)
benchmark_action = action_view(CANCEL)

FORM_FIELDS = ("deployment", "region", "version", "workload", "slo", "seed", "first_rate", "beside_traffic")
USUAL_WORKLOAD, USUAL_SLO = "1000+150", "ttft=1000,itl=60"


def _texts(form: Submission) -> dict[str, str]:
    usual = {"workload": USUAL_WORKLOAD, "slo": USUAL_SLO}
    names = (*FORM_FIELDS, *(f"rules.{name}" for name in BOUNDS))
    return {name: form.text(name, usual.get(name, "")) for name in names}


def _rules_of(texts: dict[str, str]) -> dict[str, float]:
    """The stated rules. Raises InvalidInput if one is not a number."""
    rules = {}
    for name in BOUNDS:
        if text := texts[f"rules.{name}"]:
            try:
                rules[name] = float(text)
            except ValueError:
                message = f"rules.{name} is {text[:40]!r}; it must be a number"
                raise InvalidInput(field=f"rules.{name}", rule="range", message=message) from None
    return rules


def _target_of(deployment: str, region: str) -> BenchmarkTarget:
    try:
        return benchmark_target(deployment, region)
    except NoTarget as wrong:
        raise InvalidInput(field="deployment", rule="serves", message=str(wrong)) from None


def _request_of(form: Submission) -> tuple[BenchmarkRequest, BenchmarkTarget]:
    """The request in the form, for the version that the cells serve unless it names another."""
    texts = _texts(form)
    named = {name: texts[name] for name in FORM_FIELDS} | {"version": texts["version"] or "running"}
    fields = form.valid(StartBenchmarkSerializer, **named, rules=_rules_of(texts))
    stated = fields.pop("version")
    target = _target_of(fields["deployment"], fields["region"])
    if texts["version"]:
        version = version_stated(stated, field="version")
    else:
        version = ModelVersion.objects.get(pk=target.version_id)
    benchmark_rules(fields["rules"])
    asked = BenchmarkRequest(version, **fields)
    readable_use(asked)
    return asked, target


def _start(form: Submission, thing: None) -> HttpResponse:
    asked, _ = _request_of(form)
    return redirect("benchmark", key=str(benchmark_start(asked, actor=form.actor, now=form.now).pk))


def _start_form(form: Submission, thing: None) -> Context:
    texts = _texts(form)
    return {
        "form": texts,
        "deployments": list(Deployment.objects.order_by("name").values_list("name", flat=True)),
        "rules": [(name, low, high, texts[f"rules.{name}"]) for name, (low, high) in BOUNDS.items()],
    }


def _predicted(form: Submission, thing: None) -> Context:
    """The measurement that the form describes, or {} while no deployment is chosen."""
    if not form.text("deployment"):
        return {}
    asked, target = _request_of(form)
    workload, slo = readable_use(asked)
    hidden = {**_texts(form), "workload": workload, "slo": slo, "version": asked.version.reference}
    confirmation = Confirmation(
        name="start",
        label="Start",
        url=reverse("benchmark-new"),
        effect="",
        submit=f"Benchmark {asked.version.reference}",
        fields=tuple(Field(name, kind="hidden", value=text) for name, text in hidden.items() if text),
    )
    return {"asked": asked, "target": target, "workload": workload, "slo": slo, "confirmation": confirmation}


START: Action[None] = Action(target=page_target("benchmarks", "benchmarks"), name="start", label="Start", run=_start)
benchmark_new = action_page_view(
    ActionPage(
        action=START,
        template="models_registry/benchmarks/new.html",
        context=_start_form,
        predict=_predicted,
        deployment=lambda form: form.text("deployment"),
    )
)
