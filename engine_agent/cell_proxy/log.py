"""Structured log lines on standard output: one JSON object per line, for requests and changes of state, `at` in seconds
since 1970. It never blocks the event loop and never fails a request: lines without a reader are dropped and counted."""

import asyncio
import os
import stat
import traceback
from time import monotonic, time
from typing import Any

import msgspec

FLUSH_INTERVAL_S = 0.1
MAX_WAITING_BYTES = 1024 * 1024
"""A reader that is this far behind is gone or stuck."""

_CRASH_INTERVAL_S = 1.0
"""Between two logged exceptions: a request that causes one can be repeated."""
_TRACE_CHARS = 2000

_encoder = msgspec.json.Encoder()


class LineLog:
    """Lines to a file descriptor, written ten times a second."""

    def __init__(self, descriptor: int, *, requests: bool) -> None:
        self.requests = requests
        """Requests are logged. If not, callers need not make the fields of a line."""
        self.dropped = 0
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._flush_due = False
        self._crash_logged_at = float("-inf")
        self.crashes_unlogged = 0
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.set_blocking(descriptor, False)

    def event(self, **fields: Any) -> None:
        self._add(fields)

    def crash(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs an unexpected exception, at most one per second. It is the exception handler of the event loop."""
        now = monotonic()
        if now - self._crash_logged_at < _CRASH_INTERVAL_S:
            self.crashes_unlogged += 1
            return
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error))[-_TRACE_CHARS:] if error is not None else ""
        unlogged, self.crashes_unlogged, self._crash_logged_at = self.crashes_unlogged, 0, now
        self.event(event="crash", place=context.get("message", "")[:200], trace=trace, unlogged_before=unlogged)

    def request(self, **fields: Any) -> None:
        if self.requests:
            self._add(fields)

    def flush(self) -> None:
        self._flush_due = False
        if not self._waiting:
            return
        try:
            written = os.write(self._descriptor, self._waiting)
        except BlockingIOError:
            return
        except OSError:  # the reader exited, for example with the agent that started us
            self._waiting.clear()
            self.dropped += 1
            return
        del self._waiting[:written]

    def _add(self, fields: dict[str, Any]) -> None:
        if len(self._waiting) > MAX_WAITING_BYTES:
            self.dropped += 1
        else:
            self._waiting += _encoder.encode({"at": round(time(), 3), **fields}) + b"\n"
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(FLUSH_INTERVAL_S, self.flush)
