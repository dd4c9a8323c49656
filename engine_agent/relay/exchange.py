"""One request in the relay, and the answer that its client gets. Its first run goes to HAProxy as it came, with the
request for marks. `failover` finds a further run for a stream that breaks, leaves or stalls. An answer that is not
streamed is kept until it is whole, and its request is repeated instead."""

import asyncio
import re
from typing import Final

from engine_agent.cell_proxy.admission import CLASS_HEADER, KEY_HEADER
from engine_agent.cell_proxy.api_paths import form_of
from engine_agent.cell_proxy.downstream import ClientConnection, contained, contained_task
from engine_agent.cell_proxy.refusal import Refusal, proxy_failed
from engine_agent.cell_proxy.upstream import EngineConnection, UpstreamFault
from engine_agent.cell_proxy.wire import (
    CONTINUE,
    LAST_CHUNK,
    RequestHead,
    ResponseHead,
    chunk,
    refusal_response,
    response_bytes,
)
from engine_agent.relay import continuable
from engine_agent.relay.dialects import Dialect, dialect_of
from engine_agent.relay.failover import Failover
from engine_agent.relay.marked_stream import MarkedStream
from engine_agent.relay.meter import RelayMeter
from engine_agent.relay.repeat import DEPLOYMENT_HEADER, first_request, response_opening
from engine_agent.relay.run import HaproxyPool, Run

MOST_WHOLE_BYTES: Final = 256 * 1024
"""An answer up to here is kept until it is whole. The rest of a longer one passes, and is not repeated."""
MOST_OPENING_BYTES: Final = 64 * 1024
"""Of the first event, which the failure event of Responses repeats, with the request's instructions and tools."""
_CODE: Final = re.compile(rb"[a-z_]{1,40}")
MOST_REPEATS: Final = 2
"""Of a request whose client has nothing of its answer."""


def _failed(code: str) -> Refusal:
    return Refusal(502, code, "the cell of this stream failed, and no other cell could continue it")


def _reason(code: bytes) -> str:
    """A code of a cell as the name of a count."""
    return code.decode() if _CODE.fullmatch(code) else "unknown"


class Exchange:
    """Implements `Responder` for the client, and `Continued` for further runs."""

    def __init__(self, pool: HaproxyPool, meter: RelayMeter, head: RequestHead, client: ClientConnection) -> None:
        self._pool = pool
        self._meter = meter
        self._head = head
        self._client = client
        self._dialect: Dialect | None = dialect_of(head.path)
        self._pieces: list[bytes] = []
        self._body: bytes | None = None
        self._limit = ""
        """Why this request cannot continue, whatever happens to its stream; empty if it can."""
        self._run = Run(self, None)
        self._further = Failover(self, pool, meter, head, self._dialect)
        self._connecting: asyncio.Task[None] | None = None
        self._whole = bytearray()
        self._opening = b""
        self._begun = self._ended = self._paused = False
        self._keep_alive = self._chunked = False
        self._repeats = 0
        meter.requests += 1
        meter.open += 1

    @property
    def _is_marked(self) -> bool:
        """Whether cells pass failures of the stream on, instead of counting them."""
        return self._dialect is not None and not self._limit

    @property
    def is_over(self) -> bool:
        return self._ended

    # --- Responder: from the client ---

    @contained
    def feed(self, data: bytes, *, complete: bool) -> None:
        self._pieces.append(data)
        if complete and self._body is None and not self._ended:
            self._body, self._pieces = b"".join(self._pieces), []
            self._meter.kept_bytes += len(self._body)
            if self._dialect is not None:
                self._limit = continuable.limit_of(self._body)
            self._send_first()
        elif self._head.expects_continue and not complete and len(self._pieces) == 1:
            self._client.write(CONTINUE)

    @contained
    def refuse(self, refusal: Refusal) -> None:
        self._refuse(refusal)

    @contained
    def client_gone(self) -> None:
        self._end()

    @contained
    def download_paused(self) -> None:
        self._paused = True
        self._run.pause()

    @contained
    def download_resumed(self) -> None:
        self._paused = False
        if not self._further.is_searching:
            self._run.resume()

    def crashed(self, error: Exception) -> None:
        if not self._begun and not self._ended:
            self._refuse(proxy_failed())
        elif not self._ended:
            self._end()
            self._client.abort()

    @contained
    def check(self, now: float) -> None:
        """Moves a stream whose cell is silent."""
        stream = self._run.stream
        can_move = self._begun and stream is not None and stream.prompt and not self._limit
        is_running = can_move and not self._further.is_searching and not self._paused
        if is_running and now - self._run.last_byte_at >= continuable.STALLED_AFTER_S:
            self._run.last_byte_at = now
            self._leave("stalled")

    # --- the first run ---

    def _send_first(self) -> None:
        connection = self._pool.take()
        if connection is None:
            self._connecting = asyncio.get_running_loop().create_task(self._send_on_new())
        else:
            self._send_on(connection)

    @contained_task
    async def _send_on_new(self) -> None:
        try:
            connection = await self._pool.connect()
        except OSError as error:
            self._connecting = None
            self._refuse(Refusal(503, "ingress_away", f"the relay cannot reach its ingress: {error}"))
            return
        self._connecting = None
        self._send_on(connection)

    def _send_on(self, connection: EngineConnection) -> None:
        body = self._body or b""
        self._run.connection, connection.receiver = connection, self._run
        connection.write(first_request(self._head, body, marked=self._is_marked))
        if len(body) > continuable.MOST_BODY_BYTES or self._meter.kept_bytes > continuable.MOST_KEPT_BYTES:
            self._forget()

    # --- from a cell ---

    @contained
    def received(self, run: Run, body: bytes, *, complete: bool) -> None:
        if run is self._further.next:
            self._further.received(run, body, complete=complete)
        elif self._further.is_searching:
            run.held.append((body, complete))
        else:
            self._received(run, body, complete=complete)

    @contained
    def run_failed(self, run: Run, fault: UpstreamFault) -> None:
        connection, run.connection = run.connection, None
        if run is self._further.next:
            self._further.failed()
        elif self._further.is_searching:
            return  # the stream leaves anyway
        elif run.response is None and connection is not None and connection.used_before and self._body is not None:
            self._send_first()
        elif self._begun and self._has_ended(run):
            self._write(b"", complete=True)
        elif self._begun and run.stream is not None:
            self._break("connection_lost")
        elif not self._begun and run.response is not None and self._body is not None and self._repeats < MOST_REPEATS:
            self._repeat()
        else:
            self._abandon()

    def _has_ended(self, run: Run) -> bool:
        """Whether the client has the last event of its stream, so that only the end of the answer is missing."""
        stream, dialect = run.stream, self._dialect
        return stream is not None and dialect is not None and stream.at_boundary and dialect.is_end(stream.last)

    def _received(self, run: Run, body: bytes, *, complete: bool) -> None:
        response = run.response
        if response is None:
            return
        is_stream = response.is_stream and response.status == 200 and response.content_length is None
        if not self._begun and not is_stream:
            self._add_whole(run, response, body, complete=complete)
            return
        if not self._begun and run.stream is None and self._dialect is not None:
            run.stream = MarkedStream(self._dialect)
        stream = run.stream
        shown = body if stream is None else self._marked(stream, body)
        if stream is not None and stream.broken:
            if shown:
                self._write(shown, complete=False)
            if complete:
                run.end()
                self._break(_reason(stream.broken))
            return
        if shown or complete:
            self._write(shown, complete=complete)
        if stream is not None and stream.leaving and not complete and not self._ended:
            self._leave(_reason(stream.leaving))

    def _marked(self, stream: MarkedStream, body: bytes) -> bytes:
        """The part of a piece that the client gets. Marks that are none end the continuation, not the stream."""
        shown = stream.add(body)
        if not self._opening and shown:
            self._opening = shown[:MOST_OPENING_BYTES].partition(b"\n\n")[0] + b"\n\n"
        return shown

    def _add_whole(self, run: Run, response: ResponseHead, body: bytes, *, complete: bool) -> None:
        """An answer that is not streamed: its head and body leave together, so that a cell that dies while it sends it
        costs a repeat."""
        self._whole += body
        if not complete and len(self._whole) <= MOST_WHOLE_BYTES:
            return
        whole, self._whole = bytes(self._whole), bytearray()
        self._write(whole, complete=complete)

    # --- to the client ---

    def _write(self, data: bytes, *, complete: bool) -> None:
        response = self._run.response
        if response is None or self._ended:
            return
        opening = b"" if self._begun else self._open(response)
        if self._chunked:
            self._client.write(opening + chunk(data) + (LAST_CHUNK if complete else b""))
        else:
            self._client.write(opening + data)
        if complete:
            self._run.end(keeps=True)
            keep_alive = self._keep_alive
            self._end()
            self._client.answered(keep_alive=keep_alive)

    def _open(self, response: ResponseHead) -> bytes:
        self._begun = True
        if self._run.stream is not None:
            counts = self._meter.of(self._run.header(DEPLOYMENT_HEADER))
            counts.relayed += 1
            if self._limit:
                counts.unable[self._limit] += 1
        self._keep_alive = self._client.may_keep_alive()
        framing: list[tuple[bytes, bytes]] = []
        if response.content_length is not None and not response.bodiless:
            framing.append((b"content-length", b"%d" % response.content_length))
        elif not response.bodiless and self._head.http11:
            framing.append((b"transfer-encoding", b"chunked"))
            self._chunked = True
        return response_opening(response, framing, keep_alive=self._keep_alive)

    def _refuse(self, refusal: Refusal) -> None:
        if self._ended:
            return
        if self._begun:
            self._abandon()
            return
        keep_alive = self._client.may_keep_alive()
        self._end()
        reply = refusal_response(refusal, form_of(self._head.path))
        self._client.write(response_bytes(reply, keep_alive=keep_alive))
        self._client.answered(keep_alive=keep_alive)

    def _abandon(self) -> None:
        """Breaks the connection: HAProxy sees that it got no whole answer, and repeats a request without any."""
        self._end()
        self._client.abort()

    def _give_up(self, code: str) -> None:
        """Ends a stream as its cell did, or would have."""
        if self._ended:
            return
        deployment = self._run.header(DEPLOYMENT_HEADER)
        self._meter.of(deployment).cut[code] += 1
        if not self._begun:
            self._refuse(_failed(code))
            return
        if self._is_marked:
            self._note_cut(deployment)
        stream = self._run.stream
        farewell = b"" if stream is None else stream.farewell
        if not farewell and stream is not None and self._dialect is not None:
            failed, at_boundary = _failed(code), stream.at_boundary
            farewell = self._dialect.failure(failed, self._opening, stream.events, at_boundary=at_boundary)
        chunked = self._chunked
        self._end()
        self._client.write(chunk(farewell) + LAST_CHUNK if chunked else farewell)
        self._client.answered(keep_alive=False)

    def _note_cut(self, deployment: bytes) -> None:
        named = self._head.named
        names = (deployment, named.get(KEY_HEADER, b""), named.get(CLASS_HEADER, b""))
        self._meter.note_cut(*(name.decode("latin-1") for name in names))

    def _forget(self) -> None:
        if self._body is not None:
            self._meter.kept_bytes -= len(self._body)
            self._body = None

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._forget()
        self._meter.open -= 1
        self._run.end()
        self._further.end()
        if self._connecting is not None:
            self._connecting.cancel()

    # --- further runs ---

    def _repeat(self) -> None:
        self._repeats += 1
        self._meter.of(self._run.header(DEPLOYMENT_HEADER)).repeated += 1
        self._whole.clear()
        self._run = Run(self, None)
        self._send_first()

    def _break(self, why: str) -> None:
        self._further.begin(why, self._run, self._body, self._limit, is_dead=True)

    def _leave(self, why: str) -> None:
        self._further.begin(why, self._run, self._body, self._limit, is_dead=False)

    def take_over(self, run: Run, shown: bytes, *, complete: bool) -> None:
        self._run.end()
        self._run = run
        if self._paused:
            run.pause()
        self._write(shown, complete=complete)

    def stay(self, code: str) -> None:
        """The stream stays where it is, if its cell still works."""
        run = self._run
        if run.connection is None or run.stream is None or run.stream.broken:
            self._give_up(code)
            return
        while run.held and not self._ended:
            body, complete = run.held.popleft()
            self._received(run, body, complete=complete)
        if not self._paused:
            run.resume()
