"""Samples of requests that failed without a cell, from the lines of the access log: each line of an answer of 400 or
above that no cell gave. Bounded by windows as those of cells are (`engine_agent.cell_proxy.request_samples`).

Requests with a valid key share one part of a window by tenant, all others a smaller part by error code: a flood of
unknown keys hides neither a tenant's errors nor other errors of requests without a key. A sample has the route of an
API path and never the path itself, because a client may have put anything into it."""

import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from engine_agent.cell_proxy.request_record import MAX_NAME_CHARS, MOST_MS
from engine_agent.cell_proxy.request_samples import FairPlaces
from engine_agent.ingress.access_log import LEFT_BEFORE_ANSWER, UNKNOWN, LogLine, deployment_of
from engine_agent.ingress.config import HEALTH_PATHS, VARIABLE_PART
from engine_agent.protocol.api_surface import API_PATHS
from engine_agent.protocol.request_messages import (
    REFUSALS_WITH_KEY,
    REFUSALS_WITHOUT_KEY,
    REQUEST_ID_CHARS_MAX,
    WINDOW_S,
    RequestSample,
    RequestWindow,
    SampleKind,
)

CLOSED_KEPT = 2
"""Closed windows that wait for the next report, which follows within seconds."""
_FIXED = frozenset(row.path for row in API_PATHS if not VARIABLE_PART.search(row.path))
_NAMED = tuple(row.path for row in API_PATHS if row.path not in _FIXED)
_VARIABLE = tuple((re.compile(VARIABLE_PART.sub("[^/]+", path)), path) for path in _NAMED)


class FailedLine(LogLine, frozen=True, rename={"serving_class": "class", "at": "time"}):
    """The fields of a line that a sample needs."""

    at: float
    request_id: str
    tenant: str
    path: str
    total_ms: float


@dataclass(slots=True)
class _Open:
    since: float
    failed: int = 0
    with_key: FairPlaces = field(default_factory=lambda: FairPlaces(REFUSALS_WITH_KEY))
    without_key: FairPlaces = field(default_factory=lambda: FairPlaces(REFUSALS_WITHOUT_KEY))


_lines = msgspec.json.Decoder(FailedLine)


class RefusedSampler:
    """Samples of one ingress. One thread notes lines, another takes windows."""

    def __init__(self, ingress: str, now: Callable[[], float]) -> None:
        """`now`: seconds since 1970."""
        self._ingress = ingress[:MAX_NAME_CHARS]
        self._now = now
        self._lock = threading.Lock()
        self._open = _Open(now())
        self._closed: deque[RequestWindow] = deque(maxlen=CLOSED_KEPT)

    def note(self, lines: bytes) -> None:
        """Samples whole lines of the access log."""
        failed = [line for line in _failed(lines) if is_sampled(line)]
        if not failed:
            return
        with self._lock:
            window = self._current()
            for line in failed:
                window.failed += 1
                has_key = line.key != UNKNOWN
                places, owner = (window.with_key, line.tenant) if has_key else (window.without_key, line.error)
                places.offer(owner, partial(self._described, line))

    def take(self) -> tuple[RequestWindow, ...]:
        """The windows that closed since the last call."""
        with self._lock:
            self._current()
            closed = tuple(self._closed)
            self._closed.clear()
        return closed

    def _current(self) -> _Open:
        now, window = self._now(), self._open
        if window.since <= now < window.since + WINDOW_S:
            return window
        if window.failed:
            samples = (*window.with_key.samples, *window.without_key.samples)
            self._closed.append(RequestWindow("", 0, round(window.since, 3), 0, window.failed, samples))
        self._open = _Open(now)
        return self._open

    def _described(self, line: FailedLine) -> RequestSample:
        key = "" if line.key == UNKNOWN else line.key
        return RequestSample(
            request=line.request_id,
            at=line.at,
            kind=SampleKind.ERROR if key else SampleKind.REFUSED,
            status=line.status,
            total_ms=min(max(line.total_ms, 0.0), MOST_MS),
            key=key,
            serving_class="" if line.serving_class == UNKNOWN else line.serving_class,
            path=route_of(line.path),
            ingress=self._ingress,
            reason="" if line.error == UNKNOWN else line.error[:MAX_NAME_CHARS],
            deployment=deployment_of(line)[:96],
        )


def is_sampled(line: FailedLine) -> bool:
    """Whether no cell answered, and a client saw it. Cells sample their own failures; the ingress that the client
    connected to samples the rest. The control plane repeats its own requests."""
    if line.hop != UNKNOWN or line.is_sender == 1 or line.ended in LEFT_BEFORE_ANSWER or line.path in HEALTH_PATHS:
        return False
    is_named = line.request_id != UNKNOWN and len(line.request_id) <= REQUEST_ID_CHARS_MAX
    return is_named and (line.cell == UNKNOWN or line.handed_back == 1)


def route_of(path: str) -> str:
    """The path of the API with its variable part unnamed; empty for any other path."""
    if path in _FIXED:
        return path
    return next((route for pattern, route in _VARIABLE if pattern.fullmatch(path)), "")


def _failed(lines: bytes) -> list[FailedLine]:
    if b'"status":4' not in lines and b'"status":5' not in lines:
        return []
    found = []
    for line in lines.splitlines():
        if b'"status":4' in line or b'"status":5' in line:
            try:
                found.append(_lines.decode(line))
            except msgspec.DecodeError:
                continue
    return found
