"""Reads benchmarks and searches, and defines the hooks by which traffic and the fleet tell the registry which cells to
measure, where requests enter, and how to serve a version. The registry never imports them, and this module never
writes."""

import ssl
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from django.db.models import Prefetch, Q, QuerySet

from kernel.tones import Tone
from models_registry.benchmarks.models import (
    Benchmark,
    BenchmarkPoint,
    ConfigurationSearch,
    SearchCandidate,
    SearchTrial,
)
from models_registry.benchmarks.planning.configuration_search import (
    BUDGET,
    FIDELITIES,
    PLACES,
    Cells,
    Choice,
    Standing,
    choice_text,
    shape_of,
    standings,
)
from models_registry.benchmarks.planning.goodput import MeasuredShape, Usual, predict_goodput
from models_registry.benchmarks.planning.measurements import LoadedStep, Machines, Measured
from models_registry.benchmarks.planning.workload import BenchmarkState, ComparedGoodput, parse_slo, version_digest
from models_registry.versions.models import ModelVersion


@dataclass(frozen=True, slots=True)
class BenchmarkTarget:
    """The cells of a deployment in a region. `cells`: names with generations; the measurement is valid while they stay
    the same. `fingerprint`: that of their machines and engine. `in_flight`: current requests. `split`: number of cells
    per role (`1p+3d`); empty: all are mixed."""

    deployment: str
    region: str
    version_id: int
    instance_type: str
    fingerprint: str
    cells: tuple[str, ...]
    machines: Machines
    in_flight: int
    regions: tuple[str, ...] = ()
    """Regions in which the deployment should have cells."""
    split: str = ""
    stated: Cells | None = None
    """Cells that an operator stated for it there, as in the API; None if the load decides their number or roles."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where requests of a deployment enter. `server_name`: the expected name in the certificate."""

    host: str
    port: int
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class ServingState(StrEnum):
    """Whether a deployment serves a version: yes, not yet, or failed."""

    SERVES = "serves"
    MOVING = "moving"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Serving:
    """`reason`: the current step, or why it failed."""

    state: ServingState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Make a deployment serve a version (`model@version`). A rollout to it that failed after `since` is a failure.
    `cells`: number of cells per role; None: unchanged."""

    deployment: str
    region: str
    version: str
    actor: str
    since: datetime
    now: datetime
    cells: Cells | None = None


class NoTarget(Exception):
    """Nothing can be measured; the text says why, and what would help."""


Describe = Callable[[str, str], BenchmarkTarget]
"""Arguments: deployment and region ("": its only one). Raises `NoTarget`."""
Enter = Callable[[str, str], Entrance]
Serve = Callable[[ServeRequest], Serving]


@dataclass
class _Registered:
    describe: Describe | None = None
    enter: Enter | None = None
    serve: Serve | None = None


_traffic = _Registered()


def register_benchmark_targets(*, describe: Describe, enter: Enter, serve: Serve) -> None:
    """Called once, when traffic's app is ready."""
    _traffic.describe, _traffic.enter, _traffic.serve = describe, enter, serve


def benchmark_target(deployment: str, region: str) -> BenchmarkTarget:
    """The cells that serve a deployment in a region. Raises NoTarget if none can be measured. Raises LookupError if
    traffic has not registered."""
    if _traffic.describe is None:
        raise LookupError("traffic has not registered its benchmark targets")
    return _traffic.describe(deployment, region)


def benchmark_entrance(deployment: str, region: str) -> Entrance:
    """Where its requests enter. Raises NoTarget if there is no entrance. Raises LookupError if traffic has not
    registered."""
    if _traffic.enter is None:
        raise LookupError("traffic has not registered its benchmark entrances")
    return _traffic.enter(deployment, region)


def benchmark_serve(request: ServeRequest) -> Serving:
    """Make a deployment serve a version. Starts what is needed; call it again until it is served or has failed. Raises
    LookupError if traffic has not registered."""
    if _traffic.serve is None:
        raise LookupError("traffic has not registered how a deployment serves a version")
    return _traffic.serve(request)


COMPARED = 200
"""Newest benchmarks of one use that are read."""


def benchmarks_described() -> QuerySet[Benchmark]:
    """Benchmarks with their versions and points, without histograms: two queries."""
    points = BenchmarkPoint.objects.order_by("rate").defer("histograms")
    return Benchmark.objects.select_related("version").prefetch_related(Prefetch("points", queryset=points))


def benchmarks_of_use(workload: str, slo: str, instance_type: str = "") -> list[Benchmark]:
    """Finished benchmarks of this stored workload and objective, newest first, without a search's shortened ones."""
    rows = whole_benchmarks(benchmarks_described()).filter(state=BenchmarkState.DONE.value, workload=workload, slo=slo)
    return list((rows.filter(instance_type=instance_type) if instance_type else rows)[:COMPARED])


def whole_benchmarks(rows: QuerySet[Benchmark]) -> QuerySet[Benchmark]:
    return rows.filter(Q(trial=None) | Q(trial__fidelity__gte=1))


def measured_of(row: Benchmark) -> Measured | None:
    """Result of a benchmark of `benchmarks_described`; None if no rate held."""
    figures = figures_at_goodput(row)
    if not row.goodput or figures is None:
        return None
    chips = max(1, row.chips)
    return Measured(
        benchmark=row.pk,
        version=row.version.reference,
        instance_type=row.instance_type,
        split=row.split,
        goodput_per_chip=row.goodput / chips,
        tokens_per_s_per_chip=figures["tokens_per_s"] / chips,
        tokens_per_s_per_user=figures["tokens_per_s_per_user"],
        dollars_per_mtoken=figures["dollars_per_mtoken"],
        joules_per_token=figures["joules_per_token"],
    )


def figures_at_goodput(row: Benchmark) -> Mapping[str, Any] | None:
    return next((point.figures for point in row.points.all() if point.rate == row.goodput), None)


def goodput_compared(before: ModelVersion, after: ModelVersion, instance_type: str) -> tuple[ComparedGoodput, ...]:
    """All conditions under which both versions, as they are now, were measured, from the newest benchmark of each: one
    query. None if one of them does not name the instance type."""
    if any(instance_type not in version.parallelism for version in (before, after)):
        return ()
    versions = {version.pk: version_digest(version.spec(), instance_type) for version in (before, after)}
    rows = (
        whole_benchmarks(Benchmark.objects.all())
        .filter(version_id__in=versions, state=BenchmarkState.DONE.value, instance_type=instance_type)
        .order_by("id")
    )
    found: dict[str, dict[int, Benchmark]] = {}
    for row in rows:
        if row.version_digest == versions[row.version_id]:
            found.setdefault(row.conditions, {})[row.version_id] = row
    pairs = (of for of in found.values() if len(of) == len(versions))
    return tuple(
        ComparedGoodput(
            f"{of[after.pk].workload} within {of[after.pk].slo}", _a_cell(of[before.pk]), _a_cell(of[after.pk])
        )
        for of in pairs
    )


def _a_cell(row: Benchmark) -> float:
    return (row.goodput or 0.0) / max(1, row.cells)


STANDING_TONE = {
    Standing.WAITING: Tone.MOVING,
    Standing.UNMEASURED: Tone.IDLE,
    Standing.PRUNED: Tone.IDLE,
    Standing.DROPPED: Tone.IDLE,
    Standing.REFUSED: Tone.WARN,
    Standing.LEFT: Tone.OK,
}


@dataclass(frozen=True, slots=True)
class SearchView:
    """A search. `measured`: scores by choice and fidelity. `refused`: why a choice is left out. `trials`: number of
    started ones."""

    candidates: dict[Choice, SearchCandidate]
    predicted: dict[Choice, float]
    measured: dict[tuple[Choice, float], float]
    refused: dict[Choice, str]
    trials: int

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(self.candidates)


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A configuration for display. `scores`: fidelity -> requests per second and chip."""

    candidate: SearchCandidate
    standing: Standing
    reason: str
    predicted: float | None
    scores: dict[float, float]
    is_best: bool

    @property
    def text(self) -> str:
        return choice_text(self.candidate.as_choice())

    @property
    def by_fidelity(self) -> tuple[float | None, ...]:
        """Scores by share of the length, None if not measured."""
        return tuple(self.scores.get(fidelity) for fidelity in FIDELITIES)

    @property
    def tone(self) -> Tone:
        return STANDING_TONE[self.standing]


def searches_described() -> QuerySet[ConfigurationSearch]:
    """Searches with their configurations and trials: four queries."""
    trials = SearchTrial.objects.select_related("benchmark").prefetch_related(
        Prefetch("benchmark__points", queryset=BenchmarkPoint.objects.defer("histograms"))
    )
    candidates = SearchCandidate.objects.select_related("version").prefetch_related(Prefetch("trials", queryset=trials))
    return ConfigurationSearch.objects.select_related("version", "best__version").prefetch_related(
        Prefetch("candidates", queryset=candidates)
    )


def search_view(row: ConfigurationSearch) -> SearchView:
    """Returns the planner's input. A row of `searches_described` needs no further query."""
    known = (
        row if "candidates" in getattr(row, "_prefetched_objects_cache", {}) else searches_described().get(pk=row.pk)
    )
    candidates = {candidate.as_choice(): candidate for candidate in known.candidates.all()}
    measured: dict[tuple[Choice, float], float] = {}
    benchmarks: dict[str, list[Benchmark]] = defaultdict(list)
    trials = 0
    for choice, candidate in candidates.items():
        for trial in candidate.trials.all():
            trials += 1
            if trial.score is not None:
                measured[choice, trial.fidelity] = trial.score
            if trial.score is not None and trial.benchmark is not None:
                benchmarks[shape_of(choice)].append(trial.benchmark)
    shapes = {name: _shape(rows) for name, rows in benchmarks.items()}
    unmeasured = [choice for choice in candidates if not any(one == choice for one, _ in measured)]
    predicted = predict_goodput(unmeasured, shapes, parse_slo(row.slo), _usual(row))
    refused = {choice: candidate.refused for choice, candidate in candidates.items() if candidate.refused}
    return SearchView(candidates, predicted, measured, refused, trials)


def candidate_rows(row: ConfigurationSearch) -> tuple[CandidateRow, ...]:
    """Every configuration of a search, best first."""
    view = search_view(row)
    found = standings(view.choices, view.predicted, view.measured, view.refused, is_over=bool(row.ends_as))
    rows = [
        CandidateRow(
            candidate,
            *found[choice],
            view.predicted.get(choice),
            {fidelity: score for (one, fidelity), score in view.measured.items() if one == choice},
            candidate.pk == row.best_id,
        )
        for choice, candidate in view.candidates.items()
    ]
    return tuple(sorted(rows, key=_rank_key))


def _rank_key(row: CandidateRow) -> tuple[Any, ...]:
    longest = max(row.scores, default=0.0)
    return not row.is_best, -longest, -row.scores.get(longest, row.predicted or 0.0), row.candidate.number


def _shape(benchmarks: list[Benchmark]) -> MeasuredShape:
    last = benchmarks[-1]
    points = tuple(step for row in benchmarks for point in row.points.all() if (step := _step(point, row.cells)))
    statistics = last.statistics
    return MeasuredShape(
        points,
        float(statistics.get("prompt_tokens_mean", 0.0)),
        float(statistics.get("output_tokens_mean", 0.0)),
        last.cells / max(1, last.chips),
    )


def _step(point: BenchmarkPoint, cells: int) -> LoadedStep | None:
    figures = point.figures
    whole = figures.get("requests", 0) - figures.get("failed", 0)
    tokens, itl_ms = figures.get("completion_tokens"), figures.get("itl_p50_ms")
    if not whole or not tokens or not itl_ms:
        return None
    return LoadedStep(figures["tokens_per_s"] / (tokens / whole) / max(1, cells), itl_ms / 1000)


def _usual(row: ConfigurationSearch) -> Usual:
    spec = row.version.spec()
    if row.instance_type in spec.parallelism:  # its draft may have been deleted since
        spec = spec.on(row.instance_type)
    stated = {f"engine_options.{name.replace('-', '_')}": value for name, value in spec.engine_options.items()}
    places, budget = stated.get(PLACES[0]), stated.get(BUDGET)
    return Usual(
        places if isinstance(places, int) else spec.max_concurrency, budget if isinstance(budget, int) else None
    )
