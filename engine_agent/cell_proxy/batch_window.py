"""Decides how much batch work a cell does next to its real-time requests, and keeps the batch requests in order.
Pure: the time is an argument, and requests do their own I/O.

Two rules. If the engine does not order classes, only one batch prompt at a time is before its first token, so that a
real-time prompt waits for at most one. And a window limits the batch requests in the engine. It follows the latency of
the cell's real-time requests: it grows while their 95th percentiles are near those without batch work, and otherwise
shrinks by a quarter. A budget in milliseconds would starve batch work in slow cells, and harm users of fast ones."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine_agent.protocol.load_messages import BatchLoad

STEER_EVERY_S = 10
"""Each step measures the time since the previous one."""
FIRST = 8
"""Enough at first: with one prompt at a time, or few of its tokens per step, no more arrive at the same moment."""
SHRINK, GROW, GROW_FIRST = 0.75, 1.25, 2.0
"""A window that is too small costs more than one that is tried for ten seconds. It doubles until latency rises (slow
start)."""
TTFT_FACTOR, TTFT_SLACK_S = 1.4, 0.02
ITL_FACTOR, ITL_SLACK_S = 2.0, 0.15
"""Averages of 95th percentiles may exceed the baseline by this. The percentile of the time between tokens can jump from
one step to the longest, without a change of the mean, if a few more tokens wait for a prompt."""
AVERAGES, STEPS_LEAST = 0.3, 3
"""A percentile of ten seconds varies by half from one step to the next, so it is averaged: the weight of a new sample,
and how many are needed before the first decision, and after each shrinking."""
MIN_TTFTS, MIN_ITLS = 5, 50
"""Fewer samples give no 95th percentile."""
LEARNS, SINKS, RISES = 0.2, 0.05, 1.005
"""How fast the baseline follows, per step: samples without batch work; samples below it with batch work; and its growth
otherwise, by a third in ten minutes: batch work does not cause a busier day."""
WAITING = 2
"""Batch requests that wait in the cell, so that the next prompt is available when one is read. Each takes a place at
the ingress from a real-time request."""


class BatchAdmission(StrEnum):
    BEGIN = "begin"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class RealtimeLatency:
    """95th percentiles of a cell's real-time requests since the last step, in seconds; None with too few samples."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(slots=True)
class BatchWindow:
    """The window of one cell: at most `most` batch requests in its engine, and `size` of them now."""

    most: int
    size: float = FIRST
    baseline: RealtimeLatency = field(default_factory=RealtimeLatency)
    recent: RealtimeLatency = field(default_factory=RealtimeLatency)
    """Averages with batch work, since it started or the window shrank."""
    is_over_budget: bool = False
    _steps: int = 0
    _has_met_resistance: bool = False

    @property
    def limit(self) -> int:
        return max(1, min(self.most, math.floor(self.size)))

    def steer(self, measured: RealtimeLatency, *, had_batch: bool, was_full: bool) -> None:
        """One step. `had_batch`: there was batch work since the last one; `was_full`: more requests waited for it."""
        known = self.baseline
        self.baseline = RealtimeLatency(
            _learned(known.ttft_s, measured.ttft_s, had_batch), _learned(known.itl_s, measured.itl_s, had_batch)
        )
        if not had_batch:
            self.recent, self._steps, self.is_over_budget = RealtimeLatency(), 0, False
            return
        self._steps += 1
        self.recent = RealtimeLatency(
            _averaged(self.recent.ttft_s, measured.ttft_s), _averaged(self.recent.itl_s, measured.itl_s)
        )
        self.is_over_budget = self._steps >= STEPS_LEAST and (
            _is_over(self.recent.ttft_s, known.ttft_s, TTFT_FACTOR, TTFT_SLACK_S)
            or _is_over(self.recent.itl_s, known.itl_s, ITL_FACTOR, ITL_SLACK_S)
        )
        if self.is_over_budget:
            self.recent, self._steps, self._has_met_resistance = RealtimeLatency(), 0, True
            self.size = max(1.0, min(self.size, self.most) * SHRINK)
        elif was_full:
            self.size = min(float(self.most), self.size * (GROW if self._has_met_resistance else GROW_FIRST))


def _averaged(known_s: float | None, measured_s: float | None) -> float | None:
    if measured_s is None or known_s is None:
        return known_s if measured_s is None else measured_s
    return known_s + (measured_s - known_s) * AVERAGES


def _is_over(measured_s: float | None, known_s: float | None, factor: float, slack_s: float) -> bool:
    return measured_s is not None and known_s is not None and measured_s > known_s * factor + slack_s


def _learned(known_s: float | None, measured_s: float | None, had_batch: bool) -> float | None:
    if measured_s is None or known_s is None:
        return known_s if measured_s is None else measured_s
    if not had_batch:
        return known_s + (measured_s - known_s) * LEARNS
    return min(measured_s, known_s * RISES) if measured_s >= known_s else known_s + (measured_s - known_s) * SINKS


def decide_batch(*, running: int, unread: int, waiting: int, limit: int | None) -> BatchAdmission:
    """Whether one more batch request begins. `running` in the engine, `unread` of them before their first token,
    `waiting` in the cell. `limit` None: no more urgent requests use the cell."""
    if waiting == 0 and unread == 0 and (limit is None or running < limit):
        return BatchAdmission.BEGIN
    return BatchAdmission.WAIT if waiting < WAITING else BatchAdmission.REFUSE


class BatchRequest(Protocol):
    def begin(self) -> None: ...


class BatchQueue:
    """The batch requests of one cell. `most`: maximum in the engine; `is_alone`: whether no more urgent class uses the
    cell, so that batch work may have all of it; `reads_one`: one prompt after the other, because the engine does not
    order classes."""

    def __init__(self, most: int, is_alone: Callable[[], bool], *, reads_one: bool = True) -> None:
        self.window = BatchWindow(most)
        self.reads_one = reads_one
        self._is_alone = is_alone
        self._joined: dict[BatchRequest, int] = {}
        """All admitted requests and their sequences, including those that still arrive."""
        self._running: set[BatchRequest] = set()
        self._unread: set[BatchRequest] = set()
        self._waiting: deque[BatchRequest] = deque()
        self._had_batch = self._was_full = False

    @property
    def limit(self) -> int | None:
        """Maximum batch requests in the engine; None while the window does not apply."""
        return None if self._is_alone() else self.window.limit

    def admits(self) -> bool:
        decided = self._decide(len(self._joined) - len(self._running))
        return decided is not BatchAdmission.REFUSE

    def join(self, request: BatchRequest) -> None:
        self._joined[request] = 1

    def weigh(self, request: object, sequences: int) -> None:
        if request in self._joined:
            self._joined[request] = sequences

    def may_begin(self, request: BatchRequest) -> bool:
        """Whether a complete request goes to the engine now. Otherwise its `begin` is called later."""
        if self._decide(len(self._waiting)) is not BatchAdmission.BEGIN:
            self._waiting.append(request)
            return False
        self._enter(request)
        return True

    def read(self, request: BatchRequest) -> None:
        if request in self._unread:
            self._unread.discard(request)
            self._call_next()

    def leave(self, request: object) -> None:
        if request not in self._joined:
            return
        del self._joined[request]
        for group in (self._running, self._unread):
            group.discard(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._call_next()

    def steer(self, measured: RealtimeLatency) -> None:
        """One step of the window, every `STEER_EVERY_S`."""
        self.window.steer(measured, had_batch=self._had_batch, was_full=self._was_full)
        self._had_batch, self._was_full = bool(self._running), False
        self._call_next()

    def load(self) -> BatchLoad:
        known, recent = self.window.baseline, self.window.recent
        return BatchLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            window=self.window.limit,
            is_alone=self._is_alone(),
            is_over_budget=self.window.is_over_budget,
            baseline_ttft_ms=_ms(known.ttft_s),
            baseline_itl_ms=_ms(known.itl_s),
            recent_ttft_ms=_ms(recent.ttft_s),
            recent_itl_ms=_ms(recent.itl_s),
        )

    def _decide(self, waiting: int) -> BatchAdmission:
        limit, running = self.limit, sum(self._joined[each] for each in self._running)
        self._was_full |= limit is not None and running >= limit
        return decide_batch(running=running, unread=len(self._unread), waiting=waiting, limit=limit)

    def _enter(self, request: BatchRequest) -> None:
        self._running.add(request)
        if self.reads_one:
            self._unread.add(request)
        self._had_batch = True

    def _call_next(self) -> None:
        while self._waiting and self._decide(0) is BatchAdmission.BEGIN:
            request = self._waiting.popleft()
            self._enter(request)
            request.begin()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
