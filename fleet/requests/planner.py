"""Compares slow requests with ordinary ones, and names the features that are more frequent among them than chance
explains. Also limits how many samples of a fleet are stored. Pure.

A request is slow if its time to the first token is above twice the median of the uniform sample; whole answers have
their own threshold, because theirs is the whole time. Counts below `LEAST_REQUESTS` and `LEAST_HITS` prove
nothing, and each of the many tested features may be frequent by chance, so p-values are corrected (Bonferroni)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import median

from engine_agent.protocol.request_messages import SAMPLES_OF_A_KIND, WINDOW_S, SampleKind
from fleet.load.planner import more_by_chance

KEPT_S = 86_400
"""How long a sample of an answered request is kept."""
FAILED_KEPT_S = 7 * 86_400
"""The same of failed requests, which are few and are searched for by their id days later."""
FAILED = (SampleKind.ERROR, SampleKind.REFUSED)
COMPARED = (SampleKind.UNIFORM, SampleKind.SLOW)
ANSWERED = (*COMPARED, SampleKind.LINKED)
REFUSED_SHARE = 0.25
"""Of the bytes for failed requests. Anyone can cause requests without a valid key, so they have their own share."""
INDEX_BYTES = 700
"""Entries of one row in all indexes, with pages three quarters full (`tests/fleet/requests/test_services.py` measures
full ones)."""
LARGEST_ROW_BYTES = 1500
SLOW_FROM = 2.0
"""Times the median. Half of the requests cannot be slow, so the median is that of ordinary ones."""
LEAST_REQUESTS = 20
"""Slow requests, and ordinary ones, for a comparison."""
LEAST_HITS = 5
LEAST_LIFT = 1.5
MOST_CHANCE = 0.01
"""Of any finding on a page, after the correction."""
SAME_REQUESTS = 0.8
"""Two features with this share of slow requests in common are one finding."""
MOST_FINDINGS = 6


def samples_of_a_kind(*, rows_max: int, cells: int, kinds: int) -> int:
    """Samples of each kind that a cell may store for a window, so that a fleet of so many cells keeps a day of samples
    of these kinds in `rows_max` rows. At least one: a larger fleet keeps less than a day."""
    of_window = rows_max / (KEPT_S / WINDOW_S)
    return max(1, min(SAMPLES_OF_A_KIND, math.floor(of_window / (kinds * max(1, cells)))))


def failed_rows(kind: SampleKind, *, budget_bytes: int, row_bytes: float) -> int:
    """Rows of failed requests of a kind that fit its share of a budget, if a row has so many bytes without indexes."""
    share = REFUSED_SHARE if kind is SampleKind.REFUSED else 1 - REFUSED_SHARE
    return int(budget_bytes * share / (row_bytes + INDEX_BYTES))


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """The columns of `fleet.requests.models.RequestSample` that a comparison needs. Reading whole rows would take three
    times as long."""

    kind: str
    at: datetime
    request: str
    cell: str
    tenant: str
    key: str
    serving_class: str
    adapter: str
    path: str
    ingress: str
    prefix: str
    is_stream: bool
    is_handed_over: bool
    in_flight: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ingress_ms: float | None
    queue_ms: float | None
    first_ms: float | None
    total_ms: float


NAMES: Mapping[str, str] = {
    "tenant": "tenant",
    "key": "key",
    "serving_class": "class",
    "adapter": "adapter",
    "path": "path",
    "ingress": "ingress",
    "prefix": "prompts that begin alike, prefix",
    "cell": "cell",
}
"""Column of a name -> the words before its value."""
AT_LEAST: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "prompt_tokens": ("prompt of at least {:,} tokens", (256, 1024, 4096, 16_384, 65_536, 262_144)),
    "completion_tokens": ("answer of at least {:,} tokens", (64, 256, 1024, 4096, 16_384)),
    "in_flight": ("at least {:,} requests in the cell", (4, 8, 16, 32, 64, 128, 256)),
}
"""Column of a count -> its words, and the thresholds that are tested. The best one is named."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A feature that is more frequent among slow requests. `hits` of `slow` requests have it, and `other_hits` of
    `others` ordinary ones. `also`: features of the same requests. `column` and `value` name those that a list can be
    narrowed to."""

    text: str
    column: str
    value: str
    hits: int
    slow: int
    other_hits: int
    others: int
    chance: float
    also: tuple[str, ...] = ()

    @property
    def support(self) -> float:
        return self.hits / self.slow

    @property
    def base(self) -> float:
        return self.other_hits / self.others

    @property
    def support_percent(self) -> float:
        return 100 * self.support

    @property
    def base_percent(self) -> float:
        return 100 * self.base

    @property
    def lift(self) -> float:
        """How many times more frequent. Half a hit stands for none, so that it is finite."""
        return self.support / (max(self.other_hits, 0.5) / self.others)


@dataclass(frozen=True, slots=True)
class Stage:
    """Medians of a stage in milliseconds; None: unknown."""

    name: str
    slow_ms: float | None
    other_ms: float | None

    @property
    def ratio(self) -> float | None:
        return self.slow_ms / self.other_ms if self.slow_ms is not None and self.other_ms else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`stream_ms` and `whole_ms`: above these, a stream or a whole answer is slow; None: too few samples."""

    verdict: str
    slow: int = 0
    others: int = 0
    stream_ms: float | None = None
    whole_ms: float | None = None
    findings: tuple[Finding, ...] = ()
    stages: tuple[Stage, ...] = ()


def compare_requests(requests: Iterable[SampledRequest]) -> Comparison:
    """Compares the slow requests of a sample with its ordinary ones."""
    answered = [each for each in requests if each.kind not in FAILED]
    streams = _threshold_ms([each for each in answered if each.is_stream])
    whole = _threshold_ms([each for each in answered if not each.is_stream])
    slow, others = _split(answered, {True: streams, False: whole})
    least = min(len(slow), len(others))
    result = Comparison("", len(slow), len(others), streams, whole, stages=_stages(slow, others) if least else ())
    if least >= LEAST_REQUESTS:
        findings = _findings(slow, others)
        return replace(result, findings=findings, verdict=_verdict(findings))
    if others and not slow:
        return replace(result, verdict="No request is slow: none took over twice the median.")
    counts = f"{len(slow)} slow and {len(others)} ordinary requests"
    return replace(result, verdict=f"Too few samples to compare: {counts}; {LEAST_REQUESTS} of each are needed.")


def first_ms(request: SampledRequest) -> float:
    return request.total_ms if request.first_ms is None else request.first_ms


def _threshold_ms(requests: Sequence[SampledRequest]) -> float | None:
    times = [first_ms(each) for each in requests if each.kind == SampleKind.UNIFORM.value]
    return SLOW_FROM * median(times) if len(times) >= LEAST_REQUESTS else None


Requests = list[SampledRequest]


def _split(requests: Iterable[SampledRequest], thresholds: Mapping[bool, float | None]) -> tuple[Requests, Requests]:
    """Slow requests, and ordinary ones of the uniform sample. Those without a threshold are in neither."""
    slow, others = [], []
    for each in requests:
        threshold = thresholds[each.is_stream]
        if threshold is None:
            continue
        if first_ms(each) > threshold:
            slow.append(each)
        elif each.kind == SampleKind.UNIFORM.value:
            others.append(each)
    return slow, others


@dataclass(slots=True)
class _Feature:
    text: str
    column: str
    value: str
    slow: set[int] = field(default_factory=set)
    """Places of the slow requests that have it."""
    others: int = 0


def _findings(slow: Sequence[SampledRequest], others: Sequence[SampledRequest]) -> tuple[Finding, ...]:
    features: dict[tuple[str, str], _Feature] = {}
    for place, request in enumerate(slow):
        for text, column, value in _features_of(request):
            features.setdefault((column, value), _Feature(text, column, value)).slow.add(place)
    for request in others:
        for _, column, value in _features_of(request):
            if (known := features.get((column, value))) is not None:
                known.others += 1
    tested = [each for each in features.values() if len(each.slow) >= LEAST_HITS]
    found = [(_finding(each, len(slow), len(others), tests=len(tested)), each.slow) for each in tested]
    proven = [pair for pair in found if pair[0].chance <= MOST_CHANCE and pair[0].lift >= LEAST_LIFT]
    proven.sort(key=lambda pair: _rank(pair[0]))
    return _merged(_best_of_columns(proven))[:MOST_FINDINGS]


def _rank(finding: Finding) -> tuple[float, float, int, str]:
    """Least chance first, and of equal thresholds the highest."""
    step = int(finding.value) if finding.column in AT_LEAST else 0
    return finding.chance, -finding.support, -step, finding.text


def _features_of(request: SampledRequest) -> Iterable[tuple[str, str, str]]:
    """The text, column and value of each feature of a request."""
    for column, words in NAMES.items():
        if value := getattr(request, column):
            yield f"{words} {value}", column, value
    for column, (words, steps) in AT_LEAST.items():
        amount = getattr(request, column)
        for step in steps:
            if amount >= step:
                yield words.format(step), column, str(step)
    if not request.cached_tokens:
        yield "no prompt token in the prefix cache", "cached_tokens", "0"
    if request.is_handed_over:
        yield "prompt read by a prefill cell", "is_handed_over", "true"
    if not request.key:
        yield "no key", "key", ""


def _finding(feature: _Feature, slow: int, others: int, *, tests: int) -> Finding:
    chance = more_by_chance(len(feature.slow), slow, feature.others, others)
    return Finding(
        text=feature.text,
        column=feature.column,
        value=feature.value,
        hits=len(feature.slow),
        slow=slow,
        other_hits=feature.others,
        others=others,
        chance=min(1.0, chance * tests),
    )


def _best_of_columns(found: Sequence[tuple[Finding, set[int]]]) -> list[tuple[Finding, set[int]]]:
    """Of thresholds of one count, the one that chance explains least."""
    kept, counted = [], set()
    for pair in found:
        column = pair[0].column
        if column in counted:
            continue
        if column in AT_LEAST:
            counted.add(column)
        kept.append(pair)
    return kept


def _merged(found: Sequence[tuple[Finding, set[int]]]) -> tuple[Finding, ...]:
    kept: list[tuple[Finding, set[int]]] = []
    for finding, places in found:
        same = next((at for at, (_, one) in enumerate(kept) if _overlap(one, places) >= SAME_REQUESTS), None)
        if same is None:
            kept.append((finding, places))
        else:
            first, one = kept[same]
            kept[same] = (replace(first, also=(*first.also, finding.text)), one)
    return tuple(finding for finding, _ in kept)


def _overlap(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other)


def _verdict(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Nothing stands out: no feature is more frequent among slow requests than chance explains."
    first = findings[0]
    return (
        f"{first.support_percent:.0f} % of the slow requests have in common: {first.text}. "
        f"{first.base_percent:.0f} % of the ordinary ones have it."
    )


def _generation_ms(request: SampledRequest) -> float | None:
    """Milliseconds between two tokens, of a stream."""
    if request.first_ms is None or not request.is_stream or request.completion_tokens < 2:
        return None
    return max(0.0, request.total_ms - request.first_ms) / (request.completion_tokens - 1)


def _engine_ms(request: SampledRequest) -> float | None:
    if request.first_ms is None or request.queue_ms is None:
        return None
    return max(0.0, request.first_ms - request.queue_ms)


STAGES: Mapping[str, Callable[[SampledRequest], float | None]] = {
    "Ingress and network": lambda request: request.ingress_ms,
    "Cell's queue": lambda request: request.queue_ms,
    "Engine to first token": _engine_ms,
    "Each further token": _generation_ms,
    "Whole request": lambda request: request.total_ms,
}


def _stages(slow: Sequence[SampledRequest], others: Sequence[SampledRequest]) -> tuple[Stage, ...]:
    stages = (Stage(name, _median(slow, value), _median(others, value)) for name, value in STAGES.items())
    return tuple(stage for stage in stages if stage.slow_ms is not None or stage.other_ms is not None)


def _median(requests: Sequence[SampledRequest], value: Callable[[SampledRequest], float | None]) -> float | None:
    known = [found for each in requests if (found := value(each)) is not None]
    return median(known) if known else None
