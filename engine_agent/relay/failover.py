"""Further runs of a stream: why it leaves its cell, whether it can continue, and attempts at other cells until one
gives the client something new. The exchange has the run that the client gets; the run that may replace it is here.

While a stream leaves a cell that still works, its old run only pauses. It resumes if no other cell takes the stream."""

import asyncio
from time import monotonic
from typing import Final, Protocol

from engine_agent.cell_proxy.downstream import contained_task
from engine_agent.cell_proxy.wire import RequestHead, ResponseHead
from engine_agent.protocol.continuation import SERVER_HEADER, VERSION_HEADER
from engine_agent.relay import continuable
from engine_agent.relay.dialects import Dialect
from engine_agent.relay.marked_stream import Diverged, MarkedStream, groups_of
from engine_agent.relay.meter import RelayMeter
from engine_agent.relay.repeat import DEPLOYMENT_HEADER, Repeat, repeated_request
from engine_agent.relay.run import HaproxyPool, Receiving, Run

SENT_AGAIN: Final = 425
"""HAProxy's status for an attempt that it wants again under the same name, for example for another region."""
_NO_CELL: Final = frozenset({SENT_AGAIN, 429, 502, 503, 504})


class Continued(Receiving, Protocol):
    """The exchange of a stream."""

    def take_over(self, run: Run, shown: bytes, *, complete: bool) -> None:
        """The client gets this run from here on, beginning with the bytes `shown`."""

    def stay(self, code: str) -> None:
        """No other cell continues the stream, for the reason with this code."""

    def crashed(self, error: Exception) -> None: ...


class Failover:
    """Of one stream. Its exchange passes on what the connections of `next` receive."""

    def __init__(
        self, exchange: Continued, pool: HaproxyPool, meter: RelayMeter, head: RequestHead, dialect: Dialect | None
    ) -> None:
        self._exchange = exchange
        self._pool = pool
        self._meter = meter
        self._head = head
        self._dialect = dialect
        self._old = Run(exchange, None)
        """The run that the client has."""
        self._body = b""
        self.next: Run | None = None
        self._taken: asyncio.Future[str] | None = None
        """Why the next run was refused; empty once it gives the client something new."""
        self._task: asyncio.Task[None] | None = None
        self._deaths = self._moves = 0
        self._left_at: dict[bytes, float] = {}
        """When the stream left a server, by name."""
        self._why, self._began_at = "", 0.0
        self._attempt_number = 0
        self._counted: int | None = None
        """Tokens that cells have counted for the tenant, with the prompt; None if no cell has. A cell that says that it
        breaks or leaves counts up to there; one that dies with its proxy counts nothing, and the next one does."""
        self._counted_before: int | None = None

    @property
    def is_searching(self) -> bool:
        """A cell is searched for, and what arrives from the old one waits."""
        return self._task is not None

    def begin(self, why: str, old: Run, body: bytes | None, limit: str, *, is_dead: bool) -> None:
        """The stream breaks (`is_dead`), or leaves a cell that still works, whose run can resume. `body`: of its
        request, if it was kept. `limit`: why this request cannot continue, empty if it can."""
        self._why, self._old, self._began_at = why, old, monotonic()
        self._counted_before = self._counted
        self._note_counted(old)
        if is_dead:
            self._deaths += 1
            self._avoid(old)
        else:
            self._moves += 1
            old.pause()
        if code := limit or self._why_not(body):
            self._meter.refused[code] += 1
            self._stay(code)
            return
        self._body = body or b""
        self._task = asyncio.get_running_loop().create_task(self._continue())

    def end(self) -> None:
        if self.next is not None:
            self.next.end()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def crashed(self, error: Exception) -> None:
        self._exchange.crashed(error)

    def _why_not(self, body: bytes | None) -> str:
        stream = self._old.stream
        if body is None or stream is None or not stream.is_whole:
            return "kept_bytes"
        if not stream.prompt:
            return "no_marks"
        if self._deaths > continuable.MOST_DEATHS or self._moves > continuable.MOST_MOVES:
            return "attempts"
        return ""

    # --- attempts ---

    @contained_task
    async def _continue(self) -> None:
        """Tries cells until one continues the stream. A cell that leaves keeps the stream if the first one refuses."""
        self._avoid(self._old)
        failures = 0
        while code := await self._attempt():
            self._meter.refused[code] += 1
            failures += code != "no_cell"
            is_late = monotonic() - self._began_at >= continuable.CONTINUES_WITHIN_S
            if self._deaths + failures > continuable.MOST_DEATHS or is_late or self._old.connection is not None:
                break
            await asyncio.sleep(continuable.AGAIN_AFTER_S)
        if code:
            self._task = None
            self._stay(code)

    def _stay(self, code: str) -> None:
        """A cell that keeps its stream counts it later."""
        self._counted = self._counted_before
        self._exchange.stay(code)

    def _note_counted(self, run: Run) -> None:
        stream = run.stream
        if stream is None:
            return
        if stream.prompt and (stream.broken or stream.leaving):
            self._counted = max(self._counted or 0, stream.tokens if stream.broken else stream.leaving_at)
        stream.leaving = b""

    async def _attempt(self) -> str:
        """Sends the stream to another cell. Returns why no cell continues it; empty once one does."""
        old = self._old.stream
        if old is None or self._dialect is None:
            return "kept_bytes"
        try:
            groups = groups_of(bytes(old.marks))
            version, deployment = self._old.header(VERSION_HEADER), self._old.header(DEPLOYMENT_HEADER)
            repeat = Repeat(
                *(self._attempt_number, version, deployment, self._avoided(), old.prompt, groups, self._counted)
            )
            connection = self._pool.take() or await self._pool.connect()
        except Diverged:
            return "diverged"
        except OSError:
            return "no_cell"
        self.next = run = Run(self._exchange, MarkedStream(self._dialect, old.events, bytes(old.marks), old.shown))
        self._taken = asyncio.get_running_loop().create_future()
        run.connection, connection.receiver = connection, run
        connection.write(repeated_request(self._head, self._body, repeat))
        try:
            async with asyncio.timeout(continuable.CONTINUES_WITHIN_S):
                code = await self._taken
        except TimeoutError:
            code = "no_cell"
        if run.response is None or run.response.status != SENT_AGAIN:
            self._attempt_number += 1
        if code:
            self.next = None
            self._avoid(run)
            self._note_counted(run)
            if run.is_connected and (run.response is None or run.response.status == 200):
                self._counted = max(self._counted or 0, repeat.tokens)  # a cell whose request is aborted counts it
            run.end()
        return code

    def _avoid(self, run: Run) -> None:
        if server := run.header(SERVER_HEADER):
            self._left_at[server] = monotonic()

    def _avoided(self) -> tuple[bytes, ...]:
        since = monotonic() - continuable.AVOIDED_FOR_S
        return tuple(server for server, left_at in self._left_at.items() if left_at > since)

    # --- from the next cell ---

    def received(self, run: Run, body: bytes, *, complete: bool) -> None:
        response, stream = run.response, run.stream
        if response is None or stream is None or self._taken is None or self._taken.done():
            return
        if response.status != 200 or not response.is_stream:
            if complete:
                self._settle(_refused_by(response))
            return
        if run.header(VERSION_HEADER) != self._old.header(VERSION_HEADER):
            self._settle("no_cell")
            return
        try:
            shown = stream.add(body)
        except Diverged:
            self._settle("diverged")
            return
        if stream.broken:
            self._settle("connection_lost")
        elif complete and not stream.is_ahead:
            self._settle("diverged")
        elif shown or complete:
            self._take_over(run, shown, complete=complete)

    def failed(self) -> None:
        """The connection to the next cell is gone."""
        self._settle("connection_lost")

    def _settle(self, code: str) -> None:
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(code)

    def _take_over(self, run: Run, shown: bytes, *, complete: bool) -> None:
        self._task = self.next = None
        counts = self._meter.of(run.header(DEPLOYMENT_HEADER))
        counts.continued[self._why] += 1
        counts.paused(monotonic() - self._began_at)
        self._settle("")
        self._exchange.take_over(run, shown, complete=complete)


def _refused_by(response: ResponseHead) -> str:
    if response.status == 409:
        return "engine_refused"
    return "no_cell" if response.status in _NO_CELL else "engine_refused"
