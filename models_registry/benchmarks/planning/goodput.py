"""Decides which rate to measure next, and when a point is over, to find goodput: the highest rate at which enough
requests meet their objective. Rates double until one breaks (or halve until one holds); then the bracket is bisected.
All rates are powers of 2^(1/32), so repeated searches measure the same rates and results differ by whole steps of 2.2
%. A point is judged by a sequential test at 25, 50, 100, … known requests, whose error is divided over the interim
tests (a half, a quarter, …). Concurrent requests meet the same burst, so together they count as one observation. Also
predicts goodput of unmeasured configurations from others of the same shape. Pure: it never sends a request or reads a
clock."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from models_registry.benchmarks.planning.configuration_search import Choice, budget_of, is_apart, places_of, shape_of
from models_registry.benchmarks.planning.measurements import LoadedStep, NoFit, StepModel, fit_loaded_steps
from models_registry.benchmarks.planning.workload import Slo

STEPS_PER_DOUBLING = 32
"""2^(1/32) = 1.0219: the final bracket is narrower than the required 3 %."""
FIRST_LOOK = 25


class PointVerdict(StrEnum):
    HELD = "held"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class GoodputRules:
    """Limits of points and of the search. Times in seconds, rates in requests per second.

    After its warm-up a point lasts `min_s`, until `min_requests` were sent, or `p99_times` times the 99th percentile of
    request durations, whichever is longest, and at most `most_s`."""

    share: float = 0.99
    confidence: float = 0.95
    min_s: float = 60.0
    min_requests: int = 200
    p99_times: float = 20.0
    most_s: float = 600.0
    warm_up_min_s: float = 5.0
    most_points: int = 10
    lowest_rate: float = 2.0**-7
    highest_rate: float = 2.0**12


LENGTHS = ("min_s", "min_requests", "p99_times", "most_s")
"""Rules for the length of a point."""


def rules_at(
    fidelity: float, rules: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """The rules of points of this share of their length. `bounds`: the allowed range of each."""
    shorter = {
        name: min(bounds[name][1], max(bounds[name][0], rules[name] * fidelity)) for name in LENGTHS if name in rules
    }
    if "min_requests" in shorter:
        shorter["min_requests"] = round(shorter["min_requests"])
    return {**rules, **shorter}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that has ended or is already too late: whether it met its objective, and its duration so far."""

    is_inside: bool
    duration_s: float


@dataclass(frozen=True, slots=True)
class PointEvaluation:
    """`is_early`: decided before the point's full length. `is_proven`: decided by the test, not by the share alone.
    `low` and `high` bound the share that met the objective, with the rules' confidence."""

    verdict: PointVerdict
    inside: int
    requests: int
    low: float
    high: float
    is_early: bool
    is_proven: bool

    @property
    def share(self) -> float:
        return self.inside / self.requests if self.requests else 0.0


def length_s(rate: float, durations_s: Sequence[float], rules: GoodputRules) -> float:
    """How long a point of this rate lasts, from the durations of its requests so far."""
    ordered = sorted(durations_s)
    p99_s = ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
    return min(rules.most_s, max(rules.min_s, rules.min_requests / rate, rules.p99_times * p99_s))


def warm_up_s(longest_inside_s: float, rules: GoodputRules) -> float:
    """Warm-up: the longest duration of a request that meets its objective. After it, requests end as fast as they
    begin."""
    return min(rules.most_s, max(rules.warm_up_min_s, longest_inside_s))


def early_verdict(outcomes: Sequence[Outcome], rules: GoodputRules, rate: float = 0.0) -> PointEvaluation | None:
    """Returns the verdict, or None if more requests are needed. `outcomes` are in due order without a gap, because fast
    requests end first. `rate`: the rate at which they were due; 0 if they are independent."""
    look = _interim_test(len(outcomes))
    if look is None:
        return None
    inside, counted = _independent_trials(outcomes, rate)
    error = (1 - rules.confidence) / 2 / 2 ** (look + 1)
    verdict = _tested(inside, counted, rules.share, error)
    return None if verdict is None else _evaluation(verdict, outcomes, rate, rules, is_early=True)


def final_verdict(outcomes: Sequence[Outcome], rules: GoodputRules, rate: float = 0.0) -> PointEvaluation:
    """The verdict at the end of a point: by the test if it is conclusive, else by the observed share. A point without
    requests is broken."""
    inside, requests = sum(outcome.is_inside for outcome in outcomes), len(outcomes)
    if not requests:
        return PointEvaluation(PointVerdict.BROKEN, 0, 0, 0.0, 1.0, is_early=False, is_proven=False)
    by_share = PointVerdict.HELD if inside >= rules.share * requests else PointVerdict.BROKEN
    return _evaluation(by_share, outcomes, rate, rules, is_early=False)


def _evaluation(
    verdict: PointVerdict, outcomes: Sequence[Outcome], rate: float, rules: GoodputRules, *, is_early: bool
) -> PointEvaluation:
    low, high = share_interval(*_independent_trials(outcomes, rate), rules.confidence)
    is_proven = is_early or low > rules.share or high < rules.share
    inside = sum(outcome.is_inside for outcome in outcomes)
    return PointEvaluation(verdict, inside, len(outcomes), low, high, is_early, is_proven)


def _independent_trials(outcomes: Sequence[Outcome], rate: float) -> tuple[int, int]:
    """Successes and trials, with concurrent requests counted as one trial (Little's law)."""
    requests = len(outcomes)
    at_once = max(1.0, rate * sum(outcome.duration_s for outcome in outcomes) / requests)
    counted = max(1, round(requests / at_once))
    outside = sum(not outcome.is_inside for outcome in outcomes)
    return counted - min(counted, round(outside / at_once)), counted


def _interim_test(requests: int) -> int | None:
    """Returns the number of the interim test that is due, or None. Tests are due at 25, 50, 100, … requests."""
    quotient, rest = divmod(requests, FIRST_LOOK)
    is_due = rest == 0 and quotient > 0 and quotient & (quotient - 1) == 0
    return quotient.bit_length() - 1 if is_due else None


def _tested(inside: int, requests: int, share: float, error: float) -> PointVerdict | None:
    if at_most_by_chance(inside, requests, share) < error:
        return PointVerdict.BROKEN
    if at_least_by_chance(inside, requests, share) < error:
        return PointVerdict.HELD
    return None


@dataclass(frozen=True, slots=True)
class Measure:
    rate: float
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The search is over. `rate` held; `broke_at` is the lowest rate that broke, None if none did. `rate` 0: none held.

    `is_exact`: the two are neighbours on the grid."""

    rate: float
    broke_at: float | None
    is_exact: bool
    reason: str

    @property
    def estimate(self) -> float:
        """Geometric mean of the interval, or the rate that held if none broke."""
        return math.sqrt(self.rate * self.broke_at) if self.broke_at else self.rate


def first_rate(latency_s: float, concurrency: int, rules: GoodputRules) -> float:
    """First rate to try, on the grid. If a single request takes `latency_s`, the limit lies between one request at a
    time and `concurrency` requests without any slowdown; this is their geometric mean."""
    return _on_grid(math.sqrt(max(1, concurrency)) / max(latency_s, 1e-3), rules)


def plan_goodput(points: Mapping[float, PointVerdict], first: float, rules: GoodputRules) -> Measure | Found:
    """The next rate to measure, or the end. `points`: verdicts by rate; `first`: the initial rate."""
    held = max((rate for rate, verdict in points.items() if verdict is PointVerdict.HELD), default=None)
    broken = min((rate for rate in _broken(points) if held is None or rate > held), default=None)
    if held is not None and broken is not None and _steps(held, broken) <= 1:
        return Found(held, broken, True, f"{held:.4g}/s held and {broken:.4g}/s, 2.2 % more, broke")
    if len(points) >= rules.most_points:
        return _given_up(held, broken, f"after {len(points)} points, the limit of one benchmark")
    if held is None:
        return _downward(broken, first, rules)
    if broken is None:
        return _upward(held, rules)
    middle = _rate(round((_position(held) + _position(broken)) / 2))
    return Measure(middle, f"between {held:.4g}/s, which held, and {broken:.4g}/s, which broke")


def _downward(broken: float | None, first: float, rules: GoodputRules) -> Measure | Found:
    if broken is None:
        return Measure(_on_grid(first, rules), "the first rate, from the duration of a single request")
    if broken / 2 < rules.lowest_rate:
        return Found(0.0, broken, False, f"even {broken:.4g}/s broke: no rate meets this objective")
    return Measure(broken / 2, f"half of {broken:.4g}/s, which broke")


def _upward(held: float, rules: GoodputRules) -> Measure | Found:
    if held * 2 > rules.highest_rate:
        return Found(held, None, False, f"{held:.4g}/s held, and the highest rate to try is {rules.highest_rate:g}/s")
    return Measure(held * 2, f"twice {held:.4g}/s, which held")


def _given_up(held: float | None, broken: float | None, when: str) -> Found:
    if held is None:
        return Found(0.0, broken, False, f"no rate held {when}")
    told = f"{held:.4g}/s held" + (f" and {broken:.4g}/s broke" if broken else "")
    return Found(held, broken, False, f"{told} {when}")


def _broken(points: Mapping[float, PointVerdict]) -> Iterable[float]:
    return (rate for rate, verdict in points.items() if verdict is PointVerdict.BROKEN)


def _position(rate: float) -> int:
    return round(math.log2(rate) * STEPS_PER_DOUBLING)


def _rate(position: int) -> float:
    return math.exp2(position / STEPS_PER_DOUBLING)


def _steps(low: float, high: float) -> int:
    return _position(high) - _position(low)


def _on_grid(rate: float, rules: GoodputRules) -> float:
    """The nearest power of two, so that brackets of any two searches nest."""
    bounded = min(max(rate, rules.lowest_rate), rules.highest_rate)
    return math.exp2(round(math.log2(bounded)))


# Exact binomial tests, and Clopper-Pearson intervals (Biometrika 26, 1934), which are never narrower than their
# confidence.

HALVINGS = 50
"""Bisections of [0, 1], beyond any displayed precision."""


def at_most_by_chance(successes: int, trials: int, share: float) -> float:
    """Probability of at most this many successes in `trials` with success probability `share`."""
    return sum(_chance(k, trials, share) for k in range(successes + 1)) if successes < trials else 1.0


def at_least_by_chance(successes: int, trials: int, share: float) -> float:
    """Probability of at least this many successes in `trials` with success probability `share`."""
    return sum(_chance(k, trials, share) for k in range(successes, trials + 1)) if successes > 0 else 1.0


def share_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of a share. Raises ValueError if there are no trials, or more successes than trials."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} of {trials} is not a share")
    tail = (1 - confidence) / 2
    low = _crossing_share(lambda share: at_least_by_chance(successes, trials, share) >= tail) if successes else 0.0
    high = (
        _crossing_share(lambda share: at_most_by_chance(successes, trials, share) < tail) if successes < trials else 1.0
    )
    return low, high


def _chance(successes: int, trials: int, share: float) -> float:
    if share <= 0.0 or share >= 1.0:
        return float(successes == (trials if share >= 1.0 else 0))
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(ways + successes * math.log(share) + (trials - successes) * math.log1p(-share))


def _crossing_share(is_beyond: Callable[[float], bool]) -> float:
    """The share at which a test that fails at 0 and passes at 1 begins to pass."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return (low + high) / 2


# Predicts the goodput of unmeasured configurations from measured points of the same shape.


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """Points of configurations of one shape. `prompt`, `output`: mean tokens per request. `cells_per_chip` converts
    rates of a cell to rates of a chip."""

    points: tuple[LoadedStep, ...]
    prompt: float
    output: float
    cells_per_chip: float


@dataclass(frozen=True, slots=True)
class Usual:
    """The base version's concurrent requests and tokens per step, used where a choice sets none."""

    places: int
    step_tokens: int | None = None


def predict_goodput(
    choices: Iterable[Choice], shapes: Mapping[str, MeasuredShape], slo: Slo, usual: Usual
) -> dict[Choice, float]:
    """Goodput per chip of configurations whose shape was measured, if its points fit a step model. Configurations with
    prefill and decode cells are left out: either role may be the bottleneck."""
    models = {name: model for name, shape in shapes.items() if (model := _model(shape)) is not None}
    found: dict[Choice, float] = {}
    for choice in choices:
        shape, model = shapes.get(shape_of(choice)), models.get(shape_of(choice))
        if shape is None or model is None or is_apart(choice):
            continue
        tokens = budget_of(choice)
        a_cell = model.goodput(
            shape.prompt,
            shape.output,
            slo,
            places_of(choice, usual.places),
            usual.step_tokens if tokens is None else tokens,
        )
        found[choice] = a_cell * shape.cells_per_chip
    return found


def _model(shape: MeasuredShape) -> StepModel | None:
    try:
        return fit_loaded_steps(shape.points, shape.prompt)
    except NoFit:
        return None
