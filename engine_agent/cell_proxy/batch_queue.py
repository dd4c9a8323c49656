"""The batch requests of one cell: those in its engine, the one that is being read, the few that wait. It keeps who is
where and calls who may begin; `batch_window` decides, and the I/O is in the requests."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from engine_agent.cell_proxy.batch_window import BatchAdmission, BatchWindow, RealtimeLatency, decide_batch
from engine_agent.protocol.messages import BatchLoad


class BatchRequest(Protocol):
    def begin(self) -> None: ...


class BatchQueue:
    """`most`: batch requests in the engine at once, at most; `is_alone`: whether nobody more urgent uses the cell, and
    batch work may have all of it; `reads_one`: one prompt after the other, for the engine has no order of classes."""

    def __init__(self, most: int, is_alone: Callable[[], bool], *, reads_one: bool = True) -> None:
        self.window = BatchWindow(most)
        self.reads_one = reads_one
        self._is_alone = is_alone
        self._joined: dict[BatchRequest, int] = {}
        """All that were admitted, with the sequences that each is: some of them are still being uploaded."""
        self._running: set[BatchRequest] = set()
        self._unread: set[BatchRequest] = set()
        self._waiting: deque[BatchRequest] = deque()
        self._had_batch = self._was_full = False

    @property
    def limit(self) -> int | None:
        """Batch requests in the engine at once; None: the window is not in force."""
        return None if self._is_alone() else self.window.limit

    def admits(self) -> bool:
        decided = self._decide(len(self._joined) - len(self._running))
        return decided is not BatchAdmission.REFUSE

    def join(self, request: BatchRequest) -> None:
        self._joined[request] = 1

    def weigh(self, request: object, sequences: int) -> None:
        """A request, of whatever class, is so many sequences in the engine."""
        if request in self._joined:
            self._joined[request] = sequences

    def may_begin(self, request: BatchRequest) -> bool:
        """Whether one that is whole goes to the engine now; if not, it is called when it may."""
        if self._decide(len(self._waiting)) is not BatchAdmission.BEGIN:
            self._waiting.append(request)
            return False
        self._enter(request)
        return True

    def read(self, request: BatchRequest) -> None:
        """The engine has read its prompt."""
        if request in self._unread:
            self._unread.discard(request)
            self._call_next()

    def leave(self, request: object) -> None:
        """A request has ended, of whatever class."""
        if request not in self._joined:
            return
        del self._joined[request]
        for group in (self._running, self._unread):
            group.discard(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._call_next()

    def steer(self, measured: RealtimeLatency) -> None:
        """A step of the window, every `batch_window.STEER_EVERY_S`."""
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
