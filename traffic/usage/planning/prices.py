"""Token prices, machine costs and their split over accounts, and token weights measured from engines. Pure. Amounts are
exact: prices have six decimals and tokens are whole, so no sum is rounded before it is shown. A split conserves the
total: accounts and idle time get exactly the cost of an hour, to the millionth of a dollar or joule and the microgram.

A cell is busy while it has requests in flight, as ingresses count them, and idle otherwise. Its cost and energy in busy
time fall to accounts by the weight of their tokens; those of an hour without tokens are idle.

Token weights come from a model of engine steps: busy = a x steps + b x completion tokens + c x computed prompt tokens +
d x cached prompt tokens, summed over busy samples, because each completion token is one sequence in one step. The fit
is least squares without negative coefficients and needs only sums of products, so samples are not stored. With few
terms, every subset is solved (Lawson and Hanson, "Solving Least Squares Problems", 1974). A sample's weight is 1 /
target, since the error of a sum grows with its root. Each node has its own sums and the median of nodes counts, so one
wrong node among three changes nothing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import combinations
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from engine_agent.protocol.load_messages import CellWork
from fleet.capacity.planning.rates import RateKind, Rates

MILLION = Decimal(1_000_000)
SHOWN = Decimal("0.000001")
"""Amounts are shown in millionths of a dollar."""


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """US dollars per million tokens; `cached` is for prompt tokens from the cache."""

    prompt: Decimal
    cached: Decimal
    completion: Decimal


def token_price(rates: Rates, deployment: str) -> TokenPrice | None:
    """Returns a deployment's prices from the rates in force, or None without a rate for prompts or completions. Without
    a rate for cached prompt tokens, they cost as much as others."""
    prompt = rates.find(RateKind.PROMPT_PRICE, deployment)
    cached = rates.find(RateKind.CACHED_PRICE, deployment)
    completion = rates.find(RateKind.COMPLETION_PRICE, deployment)
    if prompt is None and completion is None:
        return None
    fresh = prompt or Decimal(0)
    return TokenPrice(fresh, fresh if cached is None else cached, completion or Decimal(0))


def charge(tokens: Mapping[str, int], price: TokenPrice | None) -> Decimal:
    """Returns US dollars for token counters of cells; 0 without a price. Cached tokens are a part of prompt tokens; an
    excess is ignored."""
    if price is None:
        return Decimal(0)
    prompt, completion = tokens.get("prompt_tokens", 0), tokens.get("completion_tokens", 0)
    cached = min(prompt, tokens.get("cached_tokens", 0))
    return ((prompt - cached) * price.prompt + cached * price.cached + completion * price.completion) / MILLION


HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
MICRO = Decimal("0.000001")
MOST_GAP = timedelta(days=1)
"""Longest gap between passes during which the same machines are assumed to have run."""
A = TypeVar("A")


class Kind(NamedTuple):
    """Key of machine hours: instance type, deployment, version and region. Without deployment and version, the machines
    are in no cell."""

    deployment: str
    version: str
    region: str
    instance_type: str


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Relative weights of a computed prompt token, a cached one and a completion token."""

    prompt: int
    cached: int
    completion: int

    def of(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Returns the weight of these tokens. Cached tokens are a part of prompt tokens; an excess is ignored."""
        cached = min(prompt_tokens, cached_tokens)
        fresh = prompt_tokens - cached
        return fresh * self.prompt + cached * self.cached + completion_tokens * self.completion


DEFAULT_WEIGHTS = TokenWeights(prompt=10, cached=1, completion=40)
"""Without token prices: ratios of public price lists, where an answer costs about four times as much as a prompt and
cached prompts a tenth (OpenAI, Anthropic, 2026)."""


@dataclass(frozen=True, slots=True)
class HourSplit(Generic[A]):
    """Whole units: `of_accounts` and `idle` sum to `whole` exactly."""

    whole: int
    idle: int
    of_accounts: Mapping[A, int]


def weights_of(price: TokenPrice | None) -> TokenWeights:
    """Returns weights from prices in force, or the default."""
    if price is None or not (price.prompt or price.completion):
        return DEFAULT_WEIGHTS
    return TokenWeights(*(int(amount / MICRO) for amount in (price.prompt, price.cached, price.completion)))


def micros(amount: Decimal) -> Decimal:
    return amount.quantize(MICRO, ROUND_HALF_EVEN)


def cost_of(spent: int) -> int:
    """Returns millionths of a dollar. `spent` is milliseconds times hourly prices in millionths of a dollar."""
    return round(Decimal(spent) / HOUR_MS)


def parts_of_hours(since: datetime, now: datetime) -> list[tuple[datetime, int]]:
    """Splits `since` to `now` into hours with their milliseconds; at most the last `MOST_GAP`."""
    at, parts = max(since, now - MOST_GAP), []
    while at < now:
        hour = at.replace(minute=0, second=0, microsecond=0)
        end = min(now, hour + HOUR)
        parts.append((hour, round((end - at) / timedelta(milliseconds=1))))
        at = end
    return parts


def parts_of_amount(amount: int, parts: Iterable[tuple[datetime, int]]) -> dict[datetime, int]:
    """Splits an evenly accrued amount by hour, without remainder."""
    hours = {hour: ms for hour, ms in parts if ms > 0}
    return shares(amount, hours) if hours else {}


def split_hour(whole: int, busy: int, weights: Mapping[A, int]) -> HourSplit[A]:
    """Splits an amount over accounts. `busy` is its part in busy time, at most all of it; `weights` are the token
    weights of the accounts."""
    used = {account: weight for account, weight in weights.items() if weight > 0}
    if not used:
        return HourSplit(whole, whole, {})
    caused = min(busy, whole)
    return HourSplit(whole, whole - caused, shares(caused, used))


def shares(amount: int, weights: Mapping[A, int]) -> dict[A, int]:
    """Splits a whole amount by weights, without remainder: shares are rounded down, and those with the largest
    remainders get one more (Hamilton's method), in the order of `weights` on ties."""
    total = sum(weights.values())
    parts = {each: divmod(amount * weight, total) for each, weight in weights.items()}
    rest = amount - sum(whole for whole, _ in parts.values())
    by_remainder = sorted(parts, key=lambda each: -parts[each][1])  # stable: ties keep their order
    more = set(by_remainder[:rest])
    return {each: whole + (each in more) for each, (whole, _) in parts.items()}


PIVOT_LEAST = 1e-9
"""For a matrix with diagonal 1: below this, two terms are indistinguishable."""
BETTER = 1e-12
"""A larger subset must reduce the squared error by this share."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Best non-negative coefficients of these terms; others are 0. `inverse` is of the terms' products, each term
    scaled to 1. `left` is the remaining squared error."""

    terms: tuple[int, ...]
    scale: tuple[float, ...]
    scaled: tuple[float, ...]
    inverse: tuple[tuple[float, ...], ...]
    left: float

    def value(self, term: int) -> float:
        return self.scaled[self.terms.index(term)] / self.scale[self.terms.index(term)] if term in self.terms else 0.0

    def error_of(self, gradient: Sequence[float], samples: int) -> float:
        """Standard error of a quantity with this gradient in the coefficients."""
        spread = self.left / max(1, samples - len(self.terms))
        slope = [gradient[term] / scale for term, scale in zip(self.terms, self.scale, strict=True)]
        variance = spread * sum(
            one * cell * other
            for one, row in zip(slope, self.inverse, strict=True)
            for cell, other in zip(row, slope, strict=True)
        )
        return math.sqrt(max(0.0, variance))


def weighed(terms: Sequence[float], target: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns a sample's contribution to the products (upper half by row), to the targets, and to the squares, which is
    its target (above 0)."""
    size = range(len(terms))
    products = tuple(terms[row] * terms[column] / target for row in size for column in size[row:])
    return products, tuple(float(term) for term in terms)


def solve(products: Sequence[float], targets: Sequence[float], square: float, terms: int) -> Solution | None:
    """Returns the best of all subsets of terms, the smaller on ties, or None if undetermined."""
    matrix = _full_matrix(products, terms)
    used = [term for term in range(terms) if matrix[term][term] > 0]
    best: Solution | None = None
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            found = _solve_subset(subset, matrix, targets, square)
            if found is not None and (best is None or found.left < best.left - BETTER * square):
                best = found
    return best


def _solve_subset(
    terms: tuple[int, ...], matrix: list[list[float]], targets: Sequence[float], square: float
) -> Solution | None:
    scale = {term: math.sqrt(matrix[term][term]) for term in terms}
    inverse = _inverse_matrix([[matrix[row][column] / scale[row] / scale[column] for column in terms] for row in terms])
    if inverse is None:
        return None
    aims = [targets[term] / scale[term] for term in terms]
    scaled = tuple(sum(cell * aim for cell, aim in zip(row, aims, strict=True)) for row in inverse)
    if min(scaled) < 0:
        return None
    left = square - sum(value * aim for value, aim in zip(scaled, aims, strict=True))
    return Solution(terms, tuple(scale.values()), scaled, tuple(map(tuple, inverse)), max(0.0, left))


def _full_matrix(products: Sequence[float], size: int) -> list[list[float]]:
    matrix = [[0.0] * size for _ in range(size)]
    places = ((row, column) for row in range(size) for column in range(row, size))
    for (row, column), value in zip(places, products, strict=True):
        matrix[row][column] = matrix[column][row] = value
    return matrix


def _inverse_matrix(matrix: list[list[float]]) -> list[list[float]] | None:
    """Gauss-Jordan elimination with the largest pivot; None if the matrix is near-singular."""
    size = len(matrix)
    rows = [[*row, *(float(number == place) for place in range(size))] for number, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < PIVOT_LEAST:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for row in range(size):
            if row != column:
                factor = rows[row][column]
                rows[row] = [value - factor * base for value, base in zip(rows[row], rows[column], strict=True)]
    return [row[size:] for row in rows]


TERMS = 4
"""Steps, completion tokens, computed prompt tokens, cached prompt tokens."""
SAMPLE_S_LEAST = 1.0
"""Shorter samples mostly measure waiting."""
STEPS_A_SECOND_MOST = 20_000.0
TOKENS_A_SECOND_MOST = 10_000_000.0
SAMPLES_LEAST = 30
ERROR_MOST = 0.25
"""Limits of the unexplained share of busy time and of each weight's standard error."""
FIT_DAYS = 7
"""Days that are fitted; older ones are deleted."""
FIT_KEPT = 14
"""Days after which a fit that was not replaced no longer counts."""
BOUND = 30.0
"""Maximum factor between the fitted and the listed weight of a completion token."""


@dataclass(frozen=True, slots=True)
class WorkSums:
    """Sums over weighted samples. `products` of the terms with each other (upper half by row); `targets` of the terms
    with busy time; `square` of busy time; `steps` and `completion_tokens` are plain sums."""

    samples: int = 0
    products: tuple[float, ...] = (0.0,) * (TERMS * (TERMS + 1) // 2)
    targets: tuple[float, ...] = (0.0,) * TERMS
    square: float = 0.0
    steps: int = 0
    completion_tokens: int = 0

    def __add__(self, other: "WorkSums") -> "WorkSums":
        return WorkSums(
            self.samples + other.samples,
            tuple(one + more for one, more in zip(self.products, other.products, strict=True)),
            tuple(one + more for one, more in zip(self.targets, other.targets, strict=True)),
            self.square + other.square,
            self.steps + other.steps,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds per step, sequence in it, computed and cached prompt token. `error` is the unexplained share of busy time
    (root mean square); `weight_error` the relative standard error of a completion token in prompt tokens; `sequences`
    the mean per step."""

    step_s: float
    sequence_s: float
    prompt_s: float
    cached_s: float
    sequences: float
    samples: int
    error: float
    weight_error: float

    @property
    def completion_s(self) -> float:
        """Seconds per completion token, including its share of the step."""
        return self.sequence_s + self.step_s / self.sequences


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """Token weights measured by nodes. `is_bounded`: limited by `BOUND`."""

    weights: TokenWeights
    fit: StepFit
    nodes: int
    is_bounded: bool = False


def sample(before: CellWork, now: CellWork) -> WorkSums | None:
    """Returns the new part of a report, or None if it is unusable or implausible."""
    busy_s = (now.busy_ms - before.busy_ms) / 1000
    steps, completion = now.steps - before.steps, now.completion_tokens - before.completion_tokens
    prompt, cached = now.prompt_tokens - before.prompt_tokens, now.cached_tokens - before.cached_tokens
    cached = min(prompt, cached)
    if now.since != before.since or min(busy_s, steps, completion, prompt, cached) < 0:
        return None
    if busy_s < SAMPLE_S_LEAST or not steps or steps > busy_s * STEPS_A_SECOND_MOST:
        return None
    if prompt + completion > busy_s * TOKENS_A_SECOND_MOST:
        return None
    products, targets = weighed((steps, completion, prompt - cached, cached), busy_s)
    return WorkSums(1, products, targets, busy_s, steps, completion)


def fit_steps(sums: WorkSums) -> StepFit | None:
    """Returns the model with the least error, or None if samples are too few or too similar."""
    if sums.samples < SAMPLES_LEAST or not sums.completion_tokens or sums.square <= 0:
        return None
    best = solve(sums.products, sums.targets, sums.square, TERMS)
    if best is None:
        return None
    sequences = sums.completion_tokens / sums.steps
    step, sequence, prompt, cached = (best.value(term) for term in range(TERMS))
    if prompt <= 0 or sequence + step / sequences <= 0:
        return None
    gradient = [_relative_growth(term, step, sequence, prompt, sequences) for term in range(TERMS)]
    weight_error = best.error_of(gradient, sums.samples)
    error = math.sqrt(best.left / sums.square)
    return StepFit(step, sequence, prompt, cached, sequences, sums.samples, error, weight_error)


def fit_tokens(of_nodes: Iterable[WorkSums], listed: TokenWeights) -> FittedWeights | None:
    """Returns weights from the median of nodes with enough data, or from all together; None without enough data. They
    stay within `BOUND` of `listed`, the weights from price lists."""
    nodes = [sums for sums in of_nodes if sums.samples]
    fits = [fit for fit in (fit_steps(sums) for sums in nodes) if fit is not None and is_good(fit)]
    together = fit_steps(sum(nodes, WorkSums()))
    if not fits:
        if together is None or not is_good(together):
            return None
        fits = [together]
    fit = fits[0] if len(fits) == 1 else _median_fit(fits)
    ratio = fit.completion_s / fit.prompt_s
    known = listed.completion / max(1, listed.prompt)
    bounded = min(max(ratio, known / BOUND), known * BOUND)
    prompt_ns = max(1.0, fit.prompt_s * 1e9)
    weights = TokenWeights(
        prompt=round(prompt_ns),
        cached=round(min(prompt_ns, fit.cached_s * 1e9)),
        completion=max(1, round(prompt_ns * bounded)),
    )
    return FittedWeights(weights, fit, len(fits) if len(fits) > 1 else len(nodes), is_bounded=bounded != ratio)


def is_good(fit: StepFit) -> bool:
    """Whether it is accurate enough to split a bill."""
    return fit.error <= ERROR_MOST and fit.weight_error <= ERROR_MOST


def _median_fit(fits: Sequence[StepFit]) -> StepFit:
    names = ("step_s", "sequence_s", "prompt_s", "cached_s", "sequences", "error", "weight_error")
    middle = {name: median(getattr(fit, name) for fit in fits) for name in names}
    return StepFit(samples=sum(fit.samples for fit in fits), **middle)


def _relative_growth(term: int, step: float, sequence: float, prompt: float, sequences: float) -> float:
    completion = sequence + step / sequences
    return (1 / sequences / completion, 1 / completion, -1 / prompt, 0.0)[term]
