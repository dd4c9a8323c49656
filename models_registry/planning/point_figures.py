"""What requests of one point say together: quantiles, tokens, goodput, energy and money. Pure.

Latencies count from the moment at which a request was due, not from when it was sent: who is late in sending because
an answer is awaited hides what users would wait (coordinated omission).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.metrics import bucket_of
from models_registry.planning.workload import Slo

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
