"""Samples of a cell's requests by windows: a uniform sample of the answered ones, the slowest to the first token, those
with certain traces, and failed ones. Bounded in number and memory; a request that is in no sample costs one random
number and two comparisons, and one hash if its client traces it.

Algorithm R keeps the uniform sample (J. Vitter, "Random sampling with a reservoir", 1985). Failed requests share their
places by tenant (`FairPlaces`)."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappush, heapreplace
from itertools import zip_longest
from random import random, shuffle

from msgspec import structs

from engine_agent.protocol.request_messages import (
    SAMPLES_OF_A_KIND,
    WINDOW_S,
    ClosedWindows,
    RequestSample,
    RequestWindow,
    SampleKind,
)

CLOSED_KEPT = 2
"""Closed windows that wait for the agent, which polls once per window."""

Describe = Callable[[], RequestSample]
"""Makes the sample of the request that ended; called only if it is kept. The kind is set here."""


class FairPlaces:
    """A number of places that owners share. If none is left, the owner with the most gives one up, so that no owner can
    hide the samples of another. Those of one owner have the same chance."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._offered: Counter[str] = Counter()
        self._kept: list[tuple[str, RequestSample]] = []

    @property
    def samples(self) -> list[RequestSample]:
        return [sample for _, sample in self._kept]

    def offer(self, owner: str, describe: Describe) -> None:
        self._offered[owner] += 1
        if len(self._kept) < self._most:
            self._kept.append((owner, describe()))
            return
        kept = Counter(each for each, _ in self._kept)
        most, _ = max(kept.items(), key=lambda pair: pair[1])
        if kept[owner] < kept[most] - 1:
            loser = most
        elif kept[owner] and random() * self._offered[owner] < kept[owner]:
            loser = owner
        else:
            return
        places = [place for place, (each, _) in enumerate(self._kept) if each == loser]
        self._kept[places[int(random() * len(places))]] = (owner, describe())


_Slow = tuple[float, int, RequestSample]
_Linked = tuple[int, int, str, RequestSample]


@dataclass(slots=True)
class _Open:
    since: float
    answered: int = 0
    failed: int = 0
    uniform: list[tuple[int, RequestSample]] = field(default_factory=list)
    """With the number of the request in the window, by which both samples know the same request."""
    slowest: tuple[list[_Slow], list[_Slow]] = field(default_factory=lambda: ([], []))
    """Heaps of whole answers and of streams; the fastest of them first."""
    linked: list[_Linked] = field(default_factory=list)
    """A heap of the traces with the lowest hashes, negated, the highest of them first. The choice depends on the ids of
    traces alone, so that another cell keeps the same ones (bottom-k sampling: E. Cohen and H. Kaplan, "Summarizing
    data using bottom-k sketches", 2007)."""
    errors: FairPlaces = field(default_factory=lambda: FairPlaces(SAMPLES_OF_A_KIND))
    """By tenant."""


class RequestSampler:
    """`now` is an argument, in seconds since 1970."""

    def __init__(self, cell: str, generation: int, now: float) -> None:
        self._cell, self._generation = cell, generation
        self._open = _Open(now)
        self._closed: deque[tuple[int, RequestWindow]] = deque(maxlen=CLOSED_KEPT)
        self._number = 0

    def answered(
        self, now: float, first_ms: float, describe: Describe, *, is_stream: bool = True, trace: str = ""
    ) -> None:
        """A request was answered, after `first_ms` to its first token, or to its whole answer. `trace`: its client's
        trace, "" for none."""
        window = self._at(now)
        number, window.answered = window.answered, window.answered + 1
        sample: RequestSample | None = None
        if number < SAMPLES_OF_A_KIND:
            sample = describe()
            window.uniform.append((number, sample))
        elif (place := int(random() * (number + 1))) < SAMPLES_OF_A_KIND:
            sample = describe()
            window.uniform[place] = (number, sample)
        slowest = window.slowest[is_stream]
        if len(slowest) < SAMPLES_OF_A_KIND:
            heappush(slowest, (first_ms, number, sample or describe()))
        elif first_ms > slowest[0][0]:
            heapreplace(slowest, (first_ms, number, sample or describe()))
        if trace:
            self._link(window.linked, number, trace, sample, describe)

    @staticmethod
    def _link(linked: list[_Linked], number: int, trace: str, sample: RequestSample | None, describe: Describe) -> None:
        """Of several requests of one trace, the first counts."""
        rank = -_trace_hash(trace)
        is_full = len(linked) == SAMPLES_OF_A_KIND
        if (is_full and rank <= linked[0][0]) or any(each[2] == trace for each in linked):
            return
        entry = (rank, number, trace, sample or describe())
        if is_full:
            heapreplace(linked, entry)
        else:
            heappush(linked, entry)

    def failed(self, now: float, tenant: str, describe: Describe) -> None:
        window = self._at(now)
        window.failed += 1
        window.errors.offer(tenant, describe)

    def closed(self, now: float, after: int) -> ClosedWindows:
        """The closed windows that a reader lacks which has all up to number `after`."""
        self._at(now)
        is_of_other_life = after > self._number
        windows = (window for number, window in self._closed if is_of_other_life or number > after)
        return ClosedWindows(self._number, tuple(windows))

    def _at(self, now: float) -> _Open:
        """The open window, after closing the one that has ended. Windows without requests are left out."""
        window = self._open
        if window.since <= now < window.since + WINDOW_S:
            return window
        if window.answered or window.failed:
            self._number += 1
            self._closed.append((self._number, self._report(window)))
        self._open = _Open(now)
        return self._open

    def _report(self, window: _Open) -> RequestWindow:
        uniform = {number for number, _ in window.uniform}
        traces = {number: trace for _, number, trace, _ in window.linked}
        ordinary = [_traced(sample, traces.get(number, "")) for number, sample in window.uniform]
        by_rank = zip_longest(*(sorted(heap, reverse=True, key=lambda each: each[:2]) for heap in window.slowest))
        ranked = [each for pair in by_rank for each in pair if each is not None and each[1] not in uniform]
        slow = [_traced(sample, traces.get(number, "")) for _, number, sample in ranked]
        others = uniform | {number for _, number, _ in ranked}
        by_hash = sorted(window.linked, reverse=True, key=lambda each: each[:2])
        linked = [_traced(sample, trace) for _, number, trace, sample in by_hash if number not in others]
        errors = window.errors.samples
        shuffle(ordinary)
        shuffle(errors)
        kinds = (
            *((SampleKind.UNIFORM, ordinary), (SampleKind.SLOW, slow)),
            *((SampleKind.LINKED, linked), (SampleKind.ERROR, errors)),
        )
        samples = tuple(each for kind, found in kinds for each in _of_kind(kind, found))
        return RequestWindow(
            self._cell, self._generation, round(window.since, 3), window.answered, window.failed, samples
        )


def _trace_hash(trace: str) -> int:
    """Ids of traces may contain a time, so they are not uniform themselves."""
    return int.from_bytes(blake2b(trace.encode(), digest_size=8).digest())


def _traced(sample: RequestSample, trace: str) -> RequestSample:
    return structs.replace(sample, trace=trace) if trace else sample


def _of_kind(kind: SampleKind, samples: Iterable[RequestSample]) -> Iterable[RequestSample]:
    return (sample if sample.kind is kind else structs.replace(sample, kind=kind) for sample in samples)
