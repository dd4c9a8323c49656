"""What tokens cost: the price of a deployment that was in force when they were counted. Pure, and exact: prices have
six places, tokens are whole, so an amount has twelve, and no sum is ever rounded before it is shown.

What cells cost and what energy they take by the time of their machines, and whose that is. Pure, in whole units, and
conserved: what an hour of a kind of machines cost is exactly what its accounts and idle time get, to the millionth of a
dollar, the millionth of a joule and the microgram.

A cell with requests in flight, as ingresses see it, is busy; the rest of its time is idle. What its machines cost and
drew while it was busy falls to accounts by what their tokens weigh, all of an hour without tokens to idle time.

Least squares without negative coefficients, out of sums of products alone. Pure.

For the few terms that are used here each subset of them is solved (Lawson and Hanson, "Solving Least Squares Problems",
1974, prove that the best is one of these). A sample weighs by 1 / its target: errors of a sum grow with its root.

What a token of a prompt, one out of a cache and one of a completion take of an engine's time. Pure.

The model of a step is a + b x sequences + c x prompt tokens (+ d x cached ones). Summed over a while in which a cell
was busy, with each completion token one sequence in one step:

    busy = a x steps + b x completion tokens + c x computed prompt tokens + d x cached prompt tokens

Least squares over such samples, none of a, b, c, d below 0. All that is needed of samples are sums of their products,
so they are added up and forgotten. Each node has sums of its own, and of the nodes' answers the median counts: one that
lies, or is slow, moves nothing where there are three.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import combinations
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from fleet.capacity.planning.rates import RateKind, Rates

MILLION = Decimal(1_000_000)
SHOWN = Decimal("0.000001")
"""Millionths of a dollar: how finely amounts are shown."""
CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """US dollars for a million tokens. Prompt tokens that came out of a cache cost `cached`."""

    prompt: Decimal
    cached: Decimal
    completion: Decimal


def token_price(rates: Rates, deployment: str) -> TokenPrice | None:
    """The price of a deployment's tokens by the rates in force, None without a rate of prompts or completions. Cached
    prompt tokens without a rate cost as much as others."""
    prompt = rates.find(RateKind.PROMPT_PRICE, deployment)
    cached = rates.find(RateKind.CACHED_PRICE, deployment)
    completion = rates.find(RateKind.COMPLETION_PRICE, deployment)
    if prompt is None and completion is None:
        return None
    fresh = prompt or Decimal(0)
    return TokenPrice(fresh, fresh if cached is None else cached, completion or Decimal(0))


def charge(tokens: Mapping[str, int], price: TokenPrice | None) -> Decimal:
    """US dollars for these tokens, by the names that cells count them under; 0 without a price. Cached tokens are a
    part of the prompt's: more of them than that are none."""
    if price is None:
        return Decimal(0)
    prompt, completion = tokens.get("prompt_tokens", 0), tokens.get("completion_tokens", 0)
    cached = min(prompt, tokens.get("cached_tokens", 0))
    return ((prompt - cached) * price.prompt + cached * price.cached + completion * price.completion) / MILLION


HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
MICRO = Decimal("0.000001")
MOST_GAP = timedelta(days=1)
"""Longest time without a look that is taken for one in which the same machines ran: they go on without us."""
A = TypeVar("A")


class Kind(NamedTuple):
    """The machines whose hours are added up together: those of one instance type in the cells of a deployment that
    serve one version in one region. No deployment and no version: in no cell."""

    deployment: str
    version: str
    region: str
    instance_type: str


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What a token of a prompt, one of those out of a cache and one of a completion take, relative to each other."""

    prompt: int
    cached: int
    completion: int

    def of(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """What these tokens weigh. Cached ones are a part of the prompt's: more of them than that are none."""
        cached = min(prompt_tokens, cached_tokens)
        fresh = prompt_tokens - cached
        return fresh * self.prompt + cached * self.cached + completion_tokens * self.completion


DEFAULT_WEIGHTS = TokenWeights(prompt=10, cached=1, completion=40)
"""Where no price of tokens says more: the ratios of public price lists, in which an answer costs about four times as
much as a prompt and cached prompts a tenth (OpenAI, Anthropic, 2026)."""


@dataclass(frozen=True, slots=True)
class HourSplit(Generic[A]):
    """Whole units: `of_accounts` and `idle` sum up to `whole` exactly."""

    whole: int
    idle: int
    of_accounts: Mapping[A, int]


def weights_of(price: TokenPrice | None) -> TokenWeights:
    """The weights of a deployment's tokens: those of its prices in force, else the default."""
    if price is None or not (price.prompt or price.completion):
        return DEFAULT_WEIGHTS
    return TokenWeights(*(int(amount / MICRO) for amount in (price.prompt, price.cached, price.completion)))


def micros(amount: Decimal) -> Decimal:
    return amount.quantize(MICRO, ROUND_HALF_EVEN)


def cost_of(spent: int) -> int:
    """Millionths of a dollar. `spent`: milliseconds of machines, each times what it costs an hour in millionths."""
    return round(Decimal(spent) / HOUR_MS)


def parts_of_hours(since: datetime, now: datetime) -> list[tuple[datetime, int]]:
    """The time from `since` to `now` as hours and milliseconds in each; no more than `MOST_GAP`, the latest."""
    at, parts = max(since, now - MOST_GAP), []
    while at < now:
        hour = at.replace(minute=0, second=0, microsecond=0)
        end = min(now, hour + HOUR)
        parts.append((hour, round((end - at) / timedelta(milliseconds=1))))
        at = end
    return parts


def parts_of_amount(amount: int, parts: Iterable[tuple[datetime, int]]) -> dict[datetime, int]:
    """An amount that fell evenly into this time, by hour, without a rest."""
    hours = {hour: ms for hour, ms in parts if ms > 0}
    return shares(amount, hours) if hours else {}


def split_hour(whole: int, busy: int, weights: Mapping[A, int]) -> HourSplit[A]:
    """Whose an amount is. `busy`: the part of it that fell into time with requests in flight, never more than all of
    it; `weights`: what the tokens of each account weigh."""
    used = {account: weight for account, weight in weights.items() if weight > 0}
    if not used:
        return HourSplit(whole, whole, {})
    caused = min(busy, whole)
    return HourSplit(whole, whole - caused, shares(caused, used))


def shares(amount: int, weights: Mapping[A, int]) -> dict[A, int]:
    """A whole amount by weights, without a rest: each gets its share rounded down, and those with the largest
    remainders one more (Hamilton's method), in the order of `weights` where they are equal."""
    total = sum(weights.values())
    parts = {each: divmod(amount * weight, total) for each, weight in weights.items()}
    rest = amount - sum(whole for whole, _ in parts.values())
    by_remainder = sorted(parts, key=lambda each: -parts[each][1])  # stable: equal ones stay in order
    more = set(by_remainder[:rest])
    return {each: whole + (each in more) for each, (whole, _) in parts.items()}


PIVOT_LEAST = 1e-9
"""Of a matrix whose diagonal is 1: below it two terms cannot be told apart."""
BETTER = 1e-12
"""By what share of all squares a larger subset has to leave less."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best coefficients of these terms alone, none below 0; those of other terms are 0. `inverse`: of the terms'
    products, each term scaled to 1. `left`: the squares that they leave over."""

    terms: tuple[int, ...]
    scale: tuple[float, ...]
    scaled: tuple[float, ...]
    inverse: tuple[tuple[float, ...], ...]
    left: float

    def value(self, term: int) -> float:
        return self.scaled[self.terms.index(term)] / self.scale[self.terms.index(term)] if term in self.terms else 0.0

    def error_of(self, gradient: Sequence[float], samples: int) -> float:
        """The standard error of what grows with the coefficients by this gradient."""
        spread = self.left / max(1, samples - len(self.terms))
        slope = [gradient[term] / scale for term, scale in zip(self.terms, self.scale, strict=True)]
        variance = spread * sum(
            one * cell * other
            for one, row in zip(slope, self.inverse, strict=True)
            for cell, other in zip(row, slope, strict=True)
        )
        return math.sqrt(max(0.0, variance))


def weighed(terms: Sequence[float], target: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What one sample adds to the products, the upper half row by row, and to the targets; its target, above 0, is what
    it adds to the squares."""
    size = range(len(terms))
    products = tuple(terms[row] * terms[column] / target for row in size for column in size[row:])
    return products, tuple(float(term) for term in terms)


def solve(products: Sequence[float], targets: Sequence[float], square: float, terms: int) -> Solution | None:
    """The best of all subsets of the terms, of equals the smaller one; None: none can be told."""
    matrix = _matrix(products, terms)
    used = [term for term in range(terms) if matrix[term][term] > 0]
    best: Solution | None = None
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            found = _solved(subset, matrix, targets, square)
            if found is not None and (best is None or found.left < best.left - BETTER * square):
                best = found
    return best


def _solved(
    terms: tuple[int, ...], matrix: list[list[float]], targets: Sequence[float], square: float
) -> Solution | None:
    scale = {term: math.sqrt(matrix[term][term]) for term in terms}
    inverse = _inverse([[matrix[row][column] / scale[row] / scale[column] for column in terms] for row in terms])
    if inverse is None:
        return None
    aims = [targets[term] / scale[term] for term in terms]
    scaled = tuple(sum(cell * aim for cell, aim in zip(row, aims, strict=True)) for row in inverse)
    if min(scaled) < 0:
        return None
    left = square - sum(value * aim for value, aim in zip(scaled, aims, strict=True))
    return Solution(terms, tuple(scale.values()), scaled, tuple(map(tuple, inverse)), max(0.0, left))


def _matrix(products: Sequence[float], size: int) -> list[list[float]]:
    matrix = [[0.0] * size for _ in range(size)]
    places = ((row, column) for row in range(size) for column in range(row, size))
    for (row, column), value in zip(places, products, strict=True):
        matrix[row][column] = matrix[column][row] = value
    return matrix


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """By Gauss and Jordan, with the largest pivot; None: there is none worth the name."""
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
"""A sample with less time in it is mostly waiting, not computing."""
STEPS_A_SECOND_MOST = 20_000.0
TOKENS_A_SECOND_MOST = 10_000_000.0
SAMPLES_LEAST = 30
ERROR_MOST = 0.25
"""Of the busy time, which what is left over may be at most; and of each weight, its standard error."""
FIT_DAYS = 7
"""What the last days tell is fitted; days of before are forgotten."""
FIT_KEPT = 14
"""Days for which a fit counts that no later one took the place of."""
BOUND = 30.0
"""A token of a completion takes so many times more, or less, than lists of prices say at most."""


@dataclass(frozen=True, slots=True)
class WorkTotals:
    """What a cell computed from `since` on, in totals of one life of its counters."""

    since: float
    busy_ms: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkSums:
    """Sums over samples, each weighed. `products`: of the terms with each other, the upper half row by row; `targets`:
    of the terms with the busy time; `square`: of the busy time with itself; `steps` and `completion_tokens`: plain."""

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
    """Seconds: of a step, of a sequence in it, of a computed and a cached prompt token. `error`: what the model leaves
    over, as a share of the busy time (root mean square); `weight_error`: the standard error of a completion token in
    prompt tokens, as a share of it. `sequences`: the mean of a step."""

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
        """Of a completion token, with its share of its step."""
        return self.sequence_s + self.step_s / self.sequences


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """The weights of tokens by what nodes measured. `is_bounded`: they were held within `BOUND` of the list's."""

    weights: TokenWeights
    fit: StepFit
    nodes: int
    is_bounded: bool = False


def sample(before: WorkTotals, now: WorkTotals) -> WorkSums | None:
    """What one look adds; None: nothing that can be used, or that could be so."""
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
    """The model that leaves least over; None: too few samples, or they are too much alike to tell its terms apart."""
    if sums.samples < SAMPLES_LEAST or not sums.completion_tokens or sums.square <= 0:
        return None
    best = solve(sums.products, sums.targets, sums.square, TERMS)
    if best is None:
        return None
    sequences = sums.completion_tokens / sums.steps
    step, sequence, prompt, cached = (best.value(term) for term in range(TERMS))
    if prompt <= 0 or sequence + step / sequences <= 0:
        return None
    gradient = [_relative(term, step, sequence, prompt, sequences) for term in range(TERMS)]
    weight_error = best.error_of(gradient, sums.samples)
    error = math.sqrt(best.left / sums.square)
    return StepFit(step, sequence, prompt, cached, sequences, sums.samples, error, weight_error)


def fit_tokens(of_nodes: Iterable[WorkSums], listed: TokenWeights) -> FittedWeights | None:
    """The weights by the median of nodes that have enough to tell; else by all of them together. None: not even so.
    `listed`: the weights by lists of prices, within `BOUND` of which these stay."""
    nodes = [sums for sums in of_nodes if sums.samples]
    fits = [fit for fit in (fit_steps(sums) for sums in nodes) if fit is not None and is_good(fit)]
    together = fit_steps(sum(nodes, WorkSums()))
    if not fits:
        if together is None or not is_good(together):
            return None
        fits = [together]
    fit = fits[0] if len(fits) == 1 else _median(fits)
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
    """Whether it says enough to split a bill by."""
    return fit.error <= ERROR_MOST and fit.weight_error <= ERROR_MOST


def _median(fits: Sequence[StepFit]) -> StepFit:
    names = ("step_s", "sequence_s", "prompt_s", "cached_s", "sequences", "error", "weight_error")
    middle = {name: median(getattr(fit, name) for fit in fits) for name in names}
    return StepFit(samples=sum(fit.samples for fit in fits), **middle)


def _relative(term: int, step: float, sequence: float, prompt: float, sequences: float) -> float:
    """By what share the ratio of a completion token to one of a prompt grows with a term."""
    completion = sequence + step / sequences
    return (1 / sequences / completion, 1 / completion, -1 / prompt, 0.0)[term]
