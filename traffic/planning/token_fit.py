"""What a token of a prompt, one out of a cache and one of a completion take of an engine's time. Pure.

The model of a step is a + b x sequences + c x prompt tokens (+ d x cached ones). Summed over a while in which a cell
was busy, with each completion token one sequence in one step:

    busy = a x steps + b x completion tokens + c x computed prompt tokens + d x cached prompt tokens

Least squares over such samples, none of a, b, c, d below 0. All that is needed of samples are sums of their products,
so they are added up and forgotten. Each node has sums of its own, and of the nodes' answers the median counts: one that
lies, or is slow, moves nothing where there are three.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from traffic.planning.least_squares import solve, weighed
from traffic.planning.machine_cost import TokenWeights

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
