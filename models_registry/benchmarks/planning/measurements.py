"""What requests of one point say together: quantiles, tokens, goodput, energy and money. Pure.

Latencies count from the moment at which a request was due, not from when it was sent: who is late in sending because
an answer is awaited hides what users would wait (coordinated omission).

What a step of an engine costs, fitted to a few measurements, and the goodput that follows from it. Pure.

A step of n sequences that also reads p prompt tokens takes a + b n + c p seconds. With requests of P prompt and O
output tokens at a rate r, Little's law gives n = r O T for a mean step of T seconds, and p = r P T, so that
T = a / (1 - r (c P + b O)): where T reaches the objective between tokens, the rate is (1 - a / itl) / (c P + b O).

Which measured configuration is best for a use, and which are best at something: the Pareto set. Pure.

Two are compared only if they were measured under the same workload and objective; machines may differ, so that what is
compared is per chip, per user, per token.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from engine_agent.protocol.metrics import bucket_of
from models_registry.benchmarks.planning.workload import Slo

Numbers = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Seconds of the generator's clock; `first_s` and `ended_s` 0: that never came. `gaps_s` lie between
    pieces of its answer. `status` 0: no answer at all. `cell`: which one says that it answered."""

    due_s: float
    sent_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    gaps_s: tuple[float, ...] = ()
    error: str = ""
    cell: str = ""

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.first_s > 0 and self.ended_s > 0 and not self.error

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def itl_s(self) -> float | None:
        """Mean time between its tokens, as `vllm bench serve` has it (TPOT)."""
        if self.completion_tokens < 2:
            return None
        return (self.ended_s - self.first_s) / (self.completion_tokens - 1)

    def is_inside(self, slo: Slo) -> bool:
        return self.is_whole and slo.is_inside(self.ttft_s, self.duration_s, self.completion_tokens)


@dataclass(frozen=True, slots=True)
class Machines:
    """What served: `watts` as they are rated, of all together; `price_per_hour` in US dollars."""

    cells: int
    chips: int
    watts: float
    price_per_hour: float


def point_figures(samples: Sequence[Sample], span_s: float, slo: Slo, machines: Machines) -> Numbers:
    """The numbers of a point; `span_s`: for how long requests were due. Times in milliseconds, money in US dollars.

    Tokens are those of whole answers, over the span and what the last one took beyond it: none is counted in a shorter
    time than it took. Concurrency is by Little's law: the others were under way beyond the span as those before it were
    within.
    """
    whole = [sample for sample in samples if sample.is_whole]
    began_s = min((sample.due_s for sample in samples), default=0.0)
    lasted_s = max([span_s, *(sample.ended_s - began_s for sample in whole)])
    completion = sum(sample.completion_tokens for sample in whole)
    prompt = sum(sample.prompt_tokens for sample in whole)
    tokens_per_s = completion / lasted_s if lasted_s else 0.0
    inside = sum(sample.is_inside(slo) for sample in samples)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(whole),
        "inside": inside,
        "goodput_per_s": inside / span_s if span_s else 0.0,
        "concurrency": sum(sample.duration_s for sample in whole) / span_s if span_s else 0.0,
        **_quantiles("ttft", [sample.ttft_s for sample in whole]),
        **_quantiles("itl", [itl_s for sample in whole if (itl_s := sample.itl_s) is not None]),
        **_quantiles("e2e", [sample.duration_s for sample in whole]),
        **_quantiles("late", [sample.sent_s - sample.due_s for sample in samples]),
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_share": sum(sample.cached_tokens for sample in whole) / prompt if prompt else None,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_chip": tokens_per_s / machines.chips if machines.chips else None,
        "tokens_per_s_per_user": _per_user(whole),
        "joules_per_token": machines.watts / tokens_per_s if tokens_per_s and machines.watts else None,
        "dollars_per_mtoken": _per_million(machines.price_per_hour, tokens_per_s),
    }


def histograms(samples: Iterable[Sample]) -> dict[str, dict[str, int]]:
    """Counts by bucket of whole answers: times to first token, gaps between pieces, durations."""
    whole = [sample for sample in samples if sample.is_whole]
    return {
        "ttft": _counts(sample.ttft_s for sample in whole),
        "gap": _counts(gap_s for sample in whole for gap_s in sample.gaps_s),
        "e2e": _counts(sample.duration_s for sample in whole),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed, of sorted ones."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _quantiles(name: str, values: list[float]) -> Numbers:
    ordered = sorted(values)
    return {
        f"{name}_p{percent}_ms": round(quantile(ordered, percent / 100) * 1000, 3) if ordered else None
        for percent in (50, 90, 99)
    }


def _per_user(whole: Sequence[Sample]) -> float | None:
    """Tokens a second that the median user sees: the reciprocal of the median time between tokens."""
    paces = sorted(itl_s for sample in whole if (itl_s := sample.itl_s))
    return 1 / quantile(paces, 0.5) if paces else None


def _per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    if not price_per_hour or not tokens_per_s:
        return None
    return price_per_hour / 3600 / tokens_per_s * 1e6


def _counts(values: Iterable[float]) -> dict[str, Any]:
    counted = Counter(bucket_of(value_s) for value_s in values)
    return {str(bucket): counted[bucket] for bucket in sorted(counted)}


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step, or the mean of many: its sequences, the prompt tokens that it read, and its seconds."""

    sequences: float
    prompt_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds: of any step, for each sequence in it, and for each prompt token that it reads."""

    base_s: float
    per_sequence_s: float
    per_prompt_token_s: float

    def step_s(self, sequences: float, prompt_tokens: float) -> float:
        return self.base_s + self.per_sequence_s * sequences + self.per_prompt_token_s * prompt_tokens

    def goodput(
        self, prompt: float, output: float, slo: Slo, concurrency: int, step_tokens: int | None = None
    ) -> float:
        """Requests a second at which the mean step takes as long as the objective allows, no more are at once than the
        engine runs, and no step has more than `step_tokens`; 0 where even an empty engine is too slow."""
        steps = 1 if step_tokens is None else math.ceil(prompt / max(1, step_tokens))
        prefill_s = (steps - 1) * self.base_s + self.step_s(1, prompt)
        if self.base_s >= slo.itl_s or prefill_s > slo.ttft_s:
            return 0.0
        work_s = self.per_prompt_token_s * prompt + self.per_sequence_s * output
        by_pace = (1 - self.base_s / slo.itl_s) / work_s if work_s > 0 else float("inf")
        # With `concurrency` sequences in every step, each holds its place for `output` of them.
        by_places = 1 / (output * (self.base_s / concurrency + self.per_sequence_s) + self.per_prompt_token_s * prompt)
        # r (prompt + output) tokens come a second, and a step of r (prompt + output) T must not have more than it may.
        by_tokens = (
            float("inf")
            if step_tokens is None
            else step_tokens / (self.base_s * (prompt + output) + step_tokens * work_s)
        )
        return min(by_pace, by_places, by_tokens)


class NoFit(ValueError):
    """The measurements do not tell the parts of a step from each other; the text says what would."""


def fit_step_model(samples: Sequence[StepSample]) -> StepModel:
    """The model that these steps fit best, by least squares of relative errors; parts below zero are zero.

    Raises:
        NoFit: fewer than three, or all alike in sequences or in prompt tokens.
    """
    rows = [(1 / one.seconds, one.sequences / one.seconds, one.prompt_tokens / one.seconds) for one in samples]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    wanted = [sum(row[i] for row in rows) for i in range(3)]
    solved = _solved(matrix, wanted) if len(samples) >= 3 else None
    if solved is None:
        raise NoFit("a step model needs three steps that differ in sequences and in prompt tokens")
    return StepModel(*(max(0.0, part) for part in solved))


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """What a point tells of steps: requests that a cell ended a second, and its mean seconds between tokens."""

    rate: float
    seconds: float


def fit_loaded_steps(points: Sequence[LoadedStep], prompt: float) -> StepModel:
    """The model that points of one workload tell, by least squares of relative errors. In them sequences and prompt
    tokens grow together, so that only the work of a whole request can be told from what each step costs: T = a + r T w.
    All of it is counted by prompt tokens, which gives the same goodput.

    Raises:
        NoFit: fewer than two points, all of one load, or steps that become faster with more load.
    """
    rows = [(1 / one.seconds, one.rate) for one in points if one.seconds > 0 and one.rate > 0]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    sa, sb, whole = sum(a for a, _ in rows), sum(b for _, b in rows), aa * bb - ab * ab
    if len(rows) < 2 or whole <= 1e-6 * aa * bb:
        raise NoFit("a step model needs two points of different load")
    base_s, work_s = (sa * bb - sb * ab) / whole, (aa * sb - ab * sa) / whole
    if work_s <= 0 or base_s <= 0:
        raise NoFit("steps did not become slower with more load: nothing follows for other limits")
    return StepModel(base_s, 0.0, work_s / max(1.0, prompt))


def _solved(matrix: list[list[float]], wanted: list[float]) -> list[float] | None:
    """Three equations by Cramer's rule; None where they do not determine it."""
    whole = _determinant(matrix)
    scale = matrix[0][0] * matrix[1][1] * matrix[2][2]
    if abs(whole) <= 1e-9 * abs(scale):
        return None
    return [
        _determinant(
            [[wanted[row] if column == part else matrix[row][column] for column in range(3)] for row in range(3)]
        )
        / whole
        for part in range(3)
    ]


def _determinant(m: list[list[float]]) -> float:
    return (
        m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
    )


class Aim(StrEnum):
    """What is wanted most: requests inside the objective per chip, a fast stream, few dollars, or few joules."""

    GOODPUT = "goodput"
    SPEED = "speed"
    COST = "cost"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class Measured:
    """A benchmark that is done, at the rate that held. `split`: how its cells were told apart by role, empty: all were
    mixed. None if unknown, such as for a machine without a price."""

    benchmark: int
    version: str
    instance_type: str
    split: str
    goodput_per_chip: float
    tokens_per_s_per_chip: float
    tokens_per_s_per_user: float | None
    dollars_per_mtoken: float | None
    joules_per_token: float | None

    @property
    def text(self) -> str:
        """The version, its region, and how its cells are distinguished."""
        return f"{self.version} on {self.instance_type}" + (f" as {self.split}" if self.split else "")


@dataclass(frozen=True, slots=True)
class Best:
    chosen: Measured
    reason: str


_WORDS: Mapping[Aim, tuple[str, Callable[[Measured], float | None], bool]] = MappingProxyType(
    {
        Aim.GOODPUT: ("requests a second and chip", lambda one: one.goodput_per_chip, True),
        Aim.SPEED: ("tokens a second for each user", lambda one: one.tokens_per_s_per_user, True),
        Aim.COST: ("dollars a million tokens", lambda one: one.dollars_per_mtoken, False),
        Aim.ENERGY: ("joules a token", lambda one: one.joules_per_token, False),
    }
)


def best_configuration(measured: Iterable[Measured], aim: Aim) -> Best | None:
    """The best, and why; None where nothing was measured that says so. Of equals the newest."""
    words, value, is_more = _WORDS[aim]
    known = [(number, one) for one in measured if (number := value(one)) is not None]
    if not known:
        return None
    ranked = sorted(known, key=lambda pair: (-pair[0] if is_more else pair[0], -pair[1].benchmark))
    number, chosen = ranked[0]
    others = [pair for pair in ranked if pair[1].text != chosen.text]
    reason = f"{number:.4g} {words}"
    if not others:
        return Best(chosen, f"{reason}; nothing else was measured so")
    second, other = others[0]
    return Best(chosen, f"{reason}, {second:.4g} of {other.text} behind it")


def pareto_set(points: Mapping[int, tuple[float, float]]) -> frozenset[int]:
    """Those that no other beats in both numbers, more being better."""
    front, best = set(), float("-inf")
    by_first = sorted(points, key=lambda name: (-points[name][0], -points[name][1]))
    for name in by_first:
        if points[name][1] > best:
            front.add(name)
            best = points[name][1]
    return frozenset(front)
