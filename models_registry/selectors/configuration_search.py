"""Searches over configurations as planners take them, and as readers see them."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from django.db.models import Prefetch, QuerySet

from kernel.tones import Tone
from models_registry.models import Benchmark, BenchmarkPoint, ConfigurationSearch, SearchCandidate, SearchTrial
from models_registry.planning.configuration_search import FIDELITIES, Choice, Standing, shape_of, standings
from models_registry.planning.goodput import MeasuredShape, Usual, predict_goodput
from models_registry.planning.step_model import LoadedStep
from models_registry.planning.varied_columns import BUDGET, PLACES, choice_text
from models_registry.planning.workload import parse_slo

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
    """A search as of now. `measured`: by choice and fidelity, `refused`: why a choice takes no part; `trials`: begun so
    far."""

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
    """A configuration as it is shown. `scores`: fidelity -> requests a second and chip."""

    candidate: SearchCandidate
    standing: Standing
    reason: str
    predicted: float | None
    scores: dict[float, float]
    is_best: bool

    @property
    def text(self) -> str:
        """What it differs in, in a line."""
        return choice_text(self.candidate.as_choice())

    @property
    def by_fidelity(self) -> tuple[float | None, ...]:
        """Scores by share of the length, None where there is none."""
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
    """What the planner goes by; of a row of `searches_described` without a query more."""
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
    """Every configuration of a search, the best first."""
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
    return tuple(sorted(rows, key=_place))


def _place(row: CandidateRow) -> tuple[Any, ...]:
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
    if row.instance_type in spec.parallelism:  # a draft may have lost it since
        spec = spec.on(row.instance_type)
    stated = {f"engine_options.{name.replace('-', '_')}": value for name, value in spec.engine_options.items()}
    places, budget = stated.get(PLACES[0]), stated.get(BUDGET)
    return Usual(
        places if isinstance(places, int) else spec.max_concurrency, budget if isinstance(budget, int) else None
    )
