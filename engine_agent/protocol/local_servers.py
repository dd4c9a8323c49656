"""asyncio servers of processes that poll each other: long polls of a state, and connections that are always closed. A
long poll names the state that the client knows. The server answers when its state differs, or after `LONG_POLL_S`. A
poll without a state is answered immediately. Polls cost the same with or without news, so long polls make them
rarer."""

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Coroutine
from functools import partial
from urllib.parse import parse_qs

LONG_POLL_S = 0.6
LONG_POLL_LATE_S = 0.6
"""How late the answer may be. A silent server is noticed within 1.2 s: as with a poll every 0.2 s and a timeout of 1 s,
which is how unhealthy servers are polled."""

ConnectionHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


def state_name(*parts: object) -> str:
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def long_poll_query(known: str) -> str:
    """The query string of a poll by a client that knows the state `known`; empty: answer immediately."""
    return f"?unless={known}&for_ms={LONG_POLL_S * 1000:.0f}" if known else ""


def poll_timeout_s(known: str, immediate_s: float) -> float:
    return LONG_POLL_S + LONG_POLL_LATE_S if known else immediate_s


def parse_long_poll(query: str) -> tuple[str, float]:
    """The state that the client knows (empty: answer immediately), and for how many seconds the answer may wait."""
    fields = parse_qs(query)
    known, for_ms = (fields.get(name, [""])[0] for name in ("unless", "for_ms"))
    return known, min(int(for_ms) / 1000, LONG_POLL_S) if for_ms.isdecimal() and for_ms.isascii() else 0.0


class StateWatch:
    """A state of this process and the long polls that wait for its change. `name` returns its current name; polls wait
    only while that is not empty."""

    def __init__(self, name: Callable[[], str]) -> None:
        self.name = name
        self._waiting: set[asyncio.Event] = set()

    def changed(self) -> None:
        for each in self._waiting:
            each.set()

    async def wait_for_change(self, query: str) -> float:
        """Returns when the poll with this query may be answered, with the seconds that it waited."""
        known, for_s = parse_long_poll(query)
        if not known or known != self.name():
            return 0.0
        clock, change = asyncio.get_running_loop().time, asyncio.Event()
        began_s = clock()
        self._waiting.add(change)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(for_s):
                    while known == self.name():
                        change.clear()
                        await change.wait()
        finally:
            self._waiting.discard(change)
        return clock() - began_s


def closing_connections(handle: ConnectionHandler) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """A callback for `asyncio.start_server` that closes each connection when its handler ends. asyncio runs a coroutine
    callback in a task. A task that is cancelled before its first step, as at exit, would never reach the code that
    closes the connection. Errors of `handle` go to the loop's exception handler."""
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(partial(_close_connection, tasks, writer))

    return begin


def _close_connection(tasks: set[asyncio.Task[None]], writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    writer.close()
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "a connection handler failed", "exception": error, "transport": writer.transport}
        task.get_loop().call_exception_handler(context)
