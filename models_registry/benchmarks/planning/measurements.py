"""Computes the figures of a point (quantiles, tokens, goodput, energy, money), fits a step model to measurements, and
chooses the best measured configurations (Pareto set). Latencies count from the time a request was due: counting from
when it was sent would hide the wait behind slow answers (coordinated omission). Step model: a step of n sequences that
reads p prompt tokens takes a + b n + c p seconds. For requests of P prompt and O output tokens at rate r, Little's law
gives n = r O T and p = r P T, so T = a / (1 - r (c P + b O)); T reaches the objective between tokens at r = (1 - a /
itl) / (c P + b O). Configurations are compared only under the same workload and objective, per chip, user or token
because machines differ. Pure: it never reads a clock or a row."""

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
    """One request. Times in seconds of the generator's clock; `first_s` and `ended_s` are 0 if that never happened.
    `gaps_s`: times between chunks of the answer. `status` 0: no response. `cell`: the cell named in the response."""

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
        """Mean time between tokens, defined as in `vllm bench serve` (TPOT)."""
        if self.completion_tokens < 2:
            return None
        return (self.ended_s - self.first_s) / (self.completion_tokens - 1)

    def is_inside(self, slo: Slo) -> bool:
        return self.is_whole and slo.is_inside(self.ttft_s, self.duration_s, self.completion_tokens)


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that served: total rated `watts`, and `price_per_hour` in US dollars."""

    cells: int
    chips: int
    watts: float
    price_per_hour: float


def point_figures(samples: Sequence[Sample], span_s: float, slo: Slo, machines: Machines) -> Numbers:
    """The figures of a point. `span_s`: how long requests were due. Times in milliseconds, money in US dollars.

    Tokens are those of complete answers, divided by the span plus the time that the last answer took beyond it.
    Concurrency follows from Little's law: requests that end after the span stand for those from before it."""
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
    """Counts of complete answers by bucket: times to first token, gaps between chunks, durations."""
    whole = [sample for sample in samples if sample.is_whole]
    return {
        "ttft": _counts(sample.ttft_s for sample in whole),
        "gap": _counts(gap_s for sample in whole for gap_s in sample.gaps_s),
        "e2e": _counts(sample.duration_s for sample in whole),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that this share does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _quantiles(name: str, values: list[float]) -> Numbers:
    ordered = sorted(values)
    return {
        f"{name}_p{percent}_ms": round(quantile(ordered, percent / 100) * 1000, 3) if ordered else None
        for percent in (50, 90, 99)
    }


def _per_user(whole: Sequence[Sample]) -> float | None:
    """Tokens per second for the median user: reciprocal of the median time between tokens."""
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
class StepModel:
    """Seconds of any step, for each sequence in it, and for each of its prompt tokens."""

    base_s: float
    per_sequence_s: float
    per_prompt_token_s: float

    def step_s(self, sequences: float, prompt_tokens: float) -> float:
        return self.base_s + self.per_sequence_s * sequences + self.per_prompt_token_s * prompt_tokens

    def goodput(
        self, prompt: float, output: float, slo: Slo, concurrency: int, step_tokens: int | None = None
    ) -> float:
        """Requests per second at which the mean step takes as long as the objective allows, within the engine's
        concurrency and `step_tokens`; 0 if even an empty engine is too slow."""
        steps = 1 if step_tokens is None else math.ceil(prompt / max(1, step_tokens))
        prefill_s = (steps - 1) * self.base_s + self.step_s(1, prompt)
        if self.base_s >= slo.itl_s or prefill_s > slo.ttft_s:
            return 0.0
        work_s = self.per_prompt_token_s * prompt + self.per_sequence_s * output
        by_pace = (1 - self.base_s / slo.itl_s) / work_s if work_s > 0 else float("inf")
        # With `concurrency` sequences in every step, each is there for `output` steps.
        by_places = 1 / (output * (self.base_s / concurrency + self.per_sequence_s) + self.per_prompt_token_s * prompt)
        # r (prompt + output) tokens arrive per second, so a step has r (prompt + output) T, at most `step_tokens`.
        by_tokens = (
            float("inf")
            if step_tokens is None
            else step_tokens / (self.base_s * (prompt + output) + step_tokens * work_s)
        )
        return min(by_pace, by_places, by_tokens)


class NoFit(ValueError):
    """The measurements do not determine a model; the text says which are missing."""


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """One point: requests that a cell ended per second, and its mean seconds between tokens."""

    rate: float
    seconds: float


def fit_loaded_steps(points: Sequence[LoadedStep], prompt: float) -> StepModel:
    """The model for points of one workload, by least squares of relative errors. Sequences and prompt tokens grow
    together here, so only the work of a whole request can be separated from the fixed cost of a step: T = a + r T w.
    All work is counted as prompt tokens, which gives the same goodput. Raises NoFit if there are fewer than two points,
    all have one load, or steps become faster with more load."""
    rows = [(1 / one.seconds, one.rate) for one in points if one.seconds > 0 and one.rate > 0]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    sa, sb, whole = sum(a for a, _ in rows), sum(b for _, b in rows), aa * bb - ab * ab
    if len(rows) < 2 or whole <= 1e-6 * aa * bb:
        raise NoFit("a step model needs two points of different load")
    base_s, work_s = (sa * bb - sb * ab) / whole, (aa * sb - ab * sa) / whole
    if work_s <= 0 or base_s <= 0:
        raise NoFit("steps did not become slower with more load, so other limits cannot be predicted")
    return StepModel(base_s, 0.0, work_s / max(1.0, prompt))


class Aim(StrEnum):
    """What to optimize: goodput per chip, speed of a stream, dollars, or joules."""

    GOODPUT = "goodput"
    SPEED = "speed"
    COST = "cost"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class Measured:
    """A finished benchmark at the rate that held. `split`: number of cells per role, empty if all were mixed. None:
    unknown, such as the cost of a machine without a price."""

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
        """The version, its instance type, and its split by role."""
        return f"{self.version} on {self.instance_type}" + (f" as {self.split}" if self.split else "")


@dataclass(frozen=True, slots=True)
class Best:
    chosen: Measured
    reason: str


_WORDS: Mapping[Aim, tuple[str, Callable[[Measured], float | None], bool]] = MappingProxyType(
    {
        Aim.GOODPUT: ("requests per second and chip", lambda one: one.goodput_per_chip, True),
        Aim.SPEED: ("tokens per second for each user", lambda one: one.tokens_per_s_per_user, True),
        Aim.COST: ("dollars per million tokens", lambda one: one.dollars_per_mtoken, False),
        Aim.ENERGY: ("joules per token", lambda one: one.joules_per_token, False),
    }
)


def best_configuration(measured: Iterable[Measured], aim: Aim) -> Best | None:
    """The best with its reason; None if nothing was measured with this aim. The newest of equals wins."""
    words, value, is_more = _WORDS[aim]
    known = [(number, one) for one in measured if (number := value(one)) is not None]
    if not known:
        return None
    ranked = sorted(known, key=lambda pair: (-pair[0] if is_more else pair[0], -pair[1].benchmark))
    number, chosen = ranked[0]
    others = [pair for pair in ranked if pair[1].text != chosen.text]
    reason = f"{number:.4g} {words}"
    if not others:
        return Best(chosen, f"{reason}; the only measured one")
    second, other = others[0]
    return Best(chosen, f"{reason}, {second:.4g} for the next, {other.text}")


def pareto_set(points: Mapping[int, tuple[float, float]]) -> frozenset[int]:
    """Those that no other beats in both numbers; higher is better."""
    front, best = set(), float("-inf")
    by_first = sorted(points, key=lambda name: (-points[name][0], -points[name][1]))
    for name in by_first:
        if points[name][1] > best:
            front.add(name)
            best = points[name][1]
    return frozenset(front)
