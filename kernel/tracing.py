"""Request ids and spans of the control plane: a request, the task that it woke, the order that was sent to an agent.
Context is W3C's; spans are sent to a collector like the cell proxies' (engine_agent.protocol.tracing).

Request ids come from `X-Request-Id` or are created. Without a collector no span is recorded. A thread sends spans, so
no request waits for the collector; spans that it does not accept in time are dropped."""

import http.client
import json
import logging
import os
import random
import re
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from time import time_ns
from typing import Any

from engine_agent.protocol.tracing import (
    TRACEPARENT,
    SpanContext,
    TraceSettings,
    TracingOff,
    begin_span,
    export_request,
    span_json,
    trace_settings,
)
from kernel.process_role import process_role

HEADER = "X-Request-Id"
MESSAGE_HEADER = "switchyard_request_id"
"""Of Celery's messages."""
_FIT = re.compile(r"[A-Za-z0-9._:-]{1,64}")

_request_id: ContextVar[str] = ContextVar("switchyard_request_id", default="")


def request_id() -> str:
    """Returns the id of the current request, task or command, or ""."""
    return _request_id.get()


def usable_request_id(given: str) -> str:
    """Returns a caller's id if it is safe to log, else a new one of 16 random bytes in hexadecimal."""
    return given if _FIT.fullmatch(given) else secrets.token_hex(16)


@contextmanager
def bind_request_id(given: str = "") -> Iterator[str]:
    """Set the request id of the block: the given one if it is safe to log, else a new one."""
    chosen = usable_request_id(given)
    token = _request_id.set(chosen)
    try:
        yield chosen
    finally:
        _request_id.reset(token)


MAX_WAITING = 2048
"""Spans; the default of OpenTelemetry's batch processor, as the next two."""
MAX_AT_ONCE = 512
INTERVAL_S = 5.0
TIMEOUT_S = 5.0

log = logging.getLogger(__name__)
_current: ContextVar[SpanContext | None] = ContextVar("switchyard_span", default=None)


@cache
def collector() -> TraceSettings | None:
    """Returns the collector's URL from OpenTelemetry's variables, or None."""
    try:
        return trace_settings(os.environ, process_role().service)
    except TracingOff as error:
        log.error("no traces: %s", error)
        return None


def traceparent() -> str:
    """Returns the header for the next request, or "" if nothing is recorded."""
    span = _current.get()
    return span.header().decode() if span else ""


def trace_id() -> str:
    """Returns the id of the recorded trace, or ""."""
    span = _current.get()
    return span.trace_id if span else ""


def span_begin(*, parent: str = "", may_begin_trace: bool = False) -> SpanContext | None:
    """Returns the context of a new span: below `parent` (a `traceparent`), else below the current one, else, if
    allowed, the root of a new trace. Returns None if it is not recorded."""
    settings, current = collector(), _current.get()
    if settings is None:
        return None
    if parent:
        return begin_span([(TRACEPARENT, parent.encode("latin-1", "replace"))], 0.0, random.getrandbits)
    if current is not None:
        return SpanContext(current.trace_id, f"{random.getrandbits(64) or 1:016x}", current.span_id)
    return begin_span([], settings.ratio, random.getrandbits) if may_begin_trace else None


@contextmanager
def span(
    name: str, *, parent: str = "", may_begin_trace: bool = False, kind: str = "server"
) -> Iterator[dict[str, Any]]:
    """Record the block as a span. Entries of the dictionary become attributes, except `failed` and `name`."""
    place, began_ns = span_begin(parent=parent, may_begin_trace=may_begin_trace), time_ns()
    attributes: dict[str, Any] = {}
    token = _current.set(place)
    try:
        yield attributes
    except BaseException:
        attributes["failed"] = True
        raise
    finally:
        _current.reset(token)
        if place is not None and (exporter := _exporter()) is not None:
            failed, called = bool(attributes.pop("failed", False)), str(attributes.pop("name", name))
            exporter.add(span_json(place, called, began_ns, time_ns(), failed, kind=kind, **attributes))


class _Exporter:
    """The queue to the collector, and its thread. Belongs to one process; a forked one has its own."""

    def __init__(self, settings: TraceSettings) -> None:
        self.pid = os.getpid()
        self._settings = settings
        self._waiting: deque[Any] = deque()
        threading.Thread(target=self._run, name="span-export", daemon=True).start()

    def add(self, finished: Any) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(finished)

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL_S):
            self.flush()

    def flush(self) -> None:
        while self._waiting:
            spans = [self._waiting.popleft() for _ in range(min(MAX_AT_ONCE, len(self._waiting)))]
            if not self._send(spans):
                return

    def _send(self, spans: list[Any]) -> bool:
        resource = {"process.pid": self.pid, "host.name": os.uname().nodename}
        body = json.dumps(export_request(self._settings.service, resource, spans))
        connection = http.client.HTTPConnection(self._settings.host, self._settings.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", self._settings.path, body, {"Content-Type": "application/json"})
            return connection.getresponse().status < 300
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


_exporters: dict[int, _Exporter] = {}
_starting = threading.Lock()


def _exporter() -> _Exporter | None:
    pid = os.getpid()
    with _starting:
        if pid not in _exporters and (settings := collector()) is not None:
            _exporters.clear()
            _exporters[pid] = _Exporter(settings)
        return _exporters.get(pid)


def spans_flush() -> None:
    """Send waiting spans now: before a process exits, and in tests."""
    if (exporter := _exporters.get(os.getpid())) is not None:
        exporter.flush()
