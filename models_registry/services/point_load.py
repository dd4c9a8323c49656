"""Offers load at one rate until its point is judged. Open loop: each request is sent when it is due, whatever became of
the others, and its latency counts from then. It decides nothing: when a point is over is planned elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from models_registry.planning.goodput import (
    GoodputRules,
    Outcome,
    PointJudgement,
    judge_early,
    judge_whole,
    length_s,
)
from models_registry.planning.point_figures import Sample
from models_registry.planning.workload import Slo
from models_registry.services.load_client import LoadClient, LoadTarget

LOOK_EVERY_S = 0.1
TELL_EVERY_S = 1.0
MOST_AT_ONCE = 4096
"""Requests under way. A cell with so many is far beyond any objective, and this host must not run out of sockets."""
HOPELESS_AFTER = 20
REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""That no lower rate would mend."""


class HopelessPoint(Exception):
    """Nothing can be measured there; the text says why."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """`samples` are the requests that count, in the order in which they were due; `span_s`: how long that was."""

    rate: float
    judgement: PointJudgement
    samples: tuple[Sample, ...]
    span_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a point under way: requests that count and are known, of about how many, and which of them were inside."""

    rate: float
    known: int
    expected: int
    inside: int


Tell = Callable[[Progress], Awaitable[None]]
Offered = tuple[float, bytes, int]
"""When it is due, in seconds from the beginning; its body; how many tokens it asks for."""


async def measure_point(
    target: LoadTarget,
    offered: Iterable[Offered],
    rate: float,
    slo: Slo,
    rules: GoodputRules,
    *,
    warm_s: float,
    tell: Tell,
) -> MeasuredPoint:
    """Offer the requests and judge those that are due after `warm_s`. `tell` is called about every second and may raise
    to end it all.

    Raises:
        HopelessPoint: the first requests that count were all refused for what they are, or never answered.
    """
    point = _Point(target, rate, slo, rules, warm_s)
    sending = asyncio.get_running_loop().create_task(point.send(offered))
    try:
        return await point.watch(sending, tell)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await point.end()


class _Point:
    def __init__(self, target: LoadTarget, rate: float, slo: Slo, rules: GoodputRules, warm_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._now_s = loop.time
        self._began_s = loop.time()
        self._client = LoadClient(target, loop.time)
        self._rate, self._slo, self._rules = rate, slo, rules
        self._warm_s = warm_s
        self._due: list[float] = []
        self._longest_s: list[float] = []
        self._samples: dict[int, Sample] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outcomes: list[Outcome] = []
        self._next = 0

    async def send(self, offered: Iterable[Offered]) -> None:
        for number, (after_s, body, tokens) in enumerate(offered):
            due_s = self._began_s + after_s
            await asyncio.sleep(due_s - self._now_s())
            if len(self._running) >= MOST_AT_ONCE:
                return
            self._due.append(due_s)
            self._longest_s.append(self._slo.longest_s(tokens))
            self._running[number] = asyncio.get_running_loop().create_task(self._one(number, body, due_s))

    async def watch(self, sending: "asyncio.Task[None]", tell: Tell) -> MeasuredPoint:
        told_s = 0.0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if judgement := self._judge(sending):
                return self._measured(judgement)
            if self._now_s() - told_s >= TELL_EVERY_S:
                told_s = self._now_s()
                expected = max(len(self._outcomes), round(self._rate * self._length_s()))
                inside = sum(outcome.is_inside for outcome in self._outcomes)
                await tell(Progress(self._rate, len(self._outcomes), expected, inside))

    async def end(self) -> None:
        """Cut what is under way, so that the next point finds an empty cell."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close()

    async def _one(self, number: int, body: bytes, due_s: float) -> None:
        try:
            self._samples[number] = await self._client.complete(body, due_s)
        finally:
            del self._running[number]

    def _judge(self, sending: "asyncio.Task[None]") -> PointJudgement | None:
        while self._next < len(self._due) and self._take(self._next):
            self._next += 1
            if judgement := judge_early(self._outcomes, self._rules, self._rate):
                return judgement
        self._refuse_hopeless()
        if sending.done() and not sending.cancelled():
            sending.result()
            return judge_whole([*self._outcomes, Outcome(False, 0.0)], self._rules, self._rate)  # too many at once
        if not self._outcomes or not self._is_over(self._warm_s + self._length_s()):
            return None
        return judge_whole(self._outcomes, self._rules, self._rate)

    def _is_over(self, length_s: float) -> bool:
        """Whether so much time has passed, and what became of each request that was due in it is known: those that take
        long would be left out else."""
        is_known = self._next >= len(self._due) or self._due[self._next] - self._began_s >= length_s
        return is_known and self._now_s() - self._began_s >= length_s

    def _take(self, number: int) -> bool:
        """Note what became of a request; False: that is not known yet."""
        sample, due_s = self._samples.get(number), self._due[number]
        counts = due_s - self._began_s >= self._warm_s
        if sample is not None:
            outcome = Outcome(sample.is_inside(self._slo), sample.duration_s)
        elif self._now_s() - due_s > self._longest_s[number]:
            outcome = Outcome(False, self._now_s() - due_s)
        else:
            return not counts
        if counts:
            self._outcomes.append(outcome)
        return True

    def _length_s(self) -> float:
        return length_s(self._rate, [outcome.duration_s for outcome in self._outcomes], self._rules)

    def _counted(self) -> list[Sample]:
        """In the order in which they were due; of one that was too late, and had not ended, that it was."""
        counted = range(self._next)
        return [
            self._samples.get(number) or Sample(self._due[number], self._due[number], error="it had not ended")
            for number in counted
            if self._due[number] - self._began_s >= self._warm_s
        ]

    def _refuse_hopeless(self) -> None:
        first = [self._samples[number] for number in sorted(self._samples)[:HOPELESS_AFTER]]
        if len(first) < HOPELESS_AFTER or any(sample.is_whole for sample in self._samples.values()):
            return
        refused = [sample for sample in first if sample.status in REFUSALS or sample.status == 0]
        if len(refused) == len(first):
            what = f"status {refused[0].status}" if refused[0].status else "no answer"
            raise HopelessPoint(f"the first {len(first)} requests got {what}: {refused[0].error[:300]}")

    def _measured(self, judgement: PointJudgement) -> MeasuredPoint:
        samples = self._counted()
        span_s = samples[-1].due_s - samples[0].due_s if len(samples) > 1 else 0.0
        return MeasuredPoint(self._rate, judgement, tuple(samples), max(span_s, len(samples) / self._rate))
