"""One request on its way through the cell: admission, the engine, the response. Headers are sent only together with the
first byte of a body, so that an engine that dies before it becomes an answer that the ingress can retry elsewhere. A
request is never repeated once the engine may have answered a byte. A failure that the request itself causes, in the
engine or here, ends in a final answer: it is no evidence against the cell, and no other cell gets the request."""

import asyncio
from time import monotonic, time

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.admission import BadHeader, read_metadata
from engine_agent.cell_proxy.answer_rewrite import AnswerRewrite, answer_rewrite
from engine_agent.cell_proxy.api_paths import form_of
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.downstream import ClientConnection, contained, contained_task, report, reported
from engine_agent.cell_proxy.engine_counters import prompt_is_read
from engine_agent.cell_proxy.engine_errors import ErrorAnswer
from engine_agent.cell_proxy.handovers import Handover
from engine_agent.cell_proxy.prompt_limit import why_prompt_is_refused
from engine_agent.cell_proxy.refusal import RETRY_HEADER, Refusal
from engine_agent.cell_proxy.request_record import CLIENT_GONE_STATUS, MAX_NAME_CHARS, RequestOutcome, RequestRecord
from engine_agent.cell_proxy.rewrite import Upload, prepare
from engine_agent.cell_proxy.upstream import EngineConnection, UpstreamFault
from engine_agent.cell_proxy.usage_reader import is_error_event
from engine_agent.cell_proxy.wire import (
    CONTINUE,
    LAST_CHUNK,
    Headers,
    RequestHead,
    ResponseHead,
    chunk,
    refusal_response,
    response_bytes,
    response_head,
)
from engine_agent.protocol.continuation import LEAVING_MARK, SILENT_MARK, broken_mark
from engine_agent.protocol.proxy_messages import INGRESS_HEADER
from engine_agent.protocol.states import Phase, ServingClass

LEAVES_WITHIN_S = 1.0
"""How long a stream pauses for a relay to move it, when the cell drains."""
LEAVES_SILENCE_AFTER_S = 12.0
"""Shorter than a relay waits for a cell that is silent (`engine_agent.relay.continuable.STALLED_AFTER_S`). An engine
that reads other long prompts is silent for seconds."""
_BROKEN = frozenset({RequestOutcome.ENGINE_ERROR, RequestOutcome.PROXY_ERROR})


def ingress_of(head: RequestHead, client: ClientConnection) -> str:
    """The ingress that sent the request: by its certificate, or on a plain link by its header. Empty: unknown."""
    if client.peer is not None:
        return client.peer.ingress
    return head.named.get(INGRESS_HEADER, b"")[:MAX_NAME_CHARS].decode("latin-1")


class Exchange:
    """One request and its answer. Implements `Responder` for the client and `Receiver` for the engine."""

    def __init__(self, cell: Cell, head: RequestHead, client: ClientConnection) -> None:
        self._cell = cell
        self._head = head
        self._client = client
        self._limits = cell.settings.limits
        self._error_form = form_of(head.path)
        self._error: ErrorAnswer | None = None
        self._upload = Upload(head, self._limits.repeat_limit_bytes)
        self._ingress = ingress_of(head, client)
        self._record = RequestRecord(cell, head, self._upload, client.peer.ingress if client.peer else "")
        self._connection: EngineConnection | None = None
        self._handover: Handover | None = None
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        """For a batch request: waits until its prompt is read."""
        self._response: ResponseHead | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._rewrite: AnswerRewrite | None = None
        self._hides_usage = self._is_batch = False
        self._started = self._response_begun = self._ended = False
        self._keep_alive = self._chunked = False
        self._verifying = self._download_paused = False
        self.is_leaving = False
        self._engine_failure = ""
        self._last_byte_at = self._record.began_at

    # --- Responder: from the client ---

    @contained
    def feed(self, data: bytes, *, complete: bool) -> None:
        self._upload.add(data, complete=complete)
        if not self._started:
            self._start()
        if complete and not self._ended:
            self._send()

    @contained
    def refuse(self, refusal: Refusal) -> None:
        self._fail(refusal, RequestOutcome.REFUSED)

    @contained
    def client_gone(self) -> None:
        status = self._response.status if self._response_begun and self._response else CLIENT_GONE_STATUS
        moved = self._record.has_left and self._response_begun
        self._close_with(RequestOutcome.MOVED if moved else RequestOutcome.CLIENT_GONE, status)

    @contained
    def download_paused(self) -> None:
        self._download_paused = True
        self._govern_engine()

    @contained
    def download_resumed(self) -> None:
        self._download_paused = False
        self._govern_engine()

    def crashed(self, error: Exception) -> None:
        is_answered = False
        with reported("Exchange.crashed"):
            is_answered = self._fail(refusals.proxy_failed(), RequestOutcome.PROXY_ERROR)
        if not is_answered:
            self._client.abort()

    def _govern_engine(self) -> None:
        """Pauses reading while the client is behind with the response, or while the engine's health is being
        verified."""
        if self._connection is None:
            return
        if self._download_paused or self._verifying or self.is_leaving:
            self._connection.pause_reading()
        else:
            self._connection.resume_reading()

    # --- InFlight: from the cell ---

    @contained
    def check(self, now: float) -> None:
        """Gives up an engine that is silent for too long, sooner while it is unhealthy. A stream that can continue
        leaves it before, so that the relay knows that this proxy works and counts the stream up to here."""
        silence_s = now - self._last_byte_at
        if silence_s >= LEAVES_SILENCE_AFTER_S and self._response_begun and not self._download_paused:
            self._leave(SILENT_MARK)
        if self._download_paused or silence_s < self._limits.abandon_after_s:
            return
        if silence_s >= self._limits.response_silence_s:
            self._fail(refusals.engine_silent(silence_s), RequestOutcome.ENGINE_ERROR)
        elif self._cell.health.bad_for_s(now) >= self._limits.abandon_after_s:
            self._engine_failed(self._cell.health.reason)

    @contained
    def leave(self) -> None:
        """Tells the relay that the stream may continue elsewhere, and waits a moment for it to do so. Then the answer
        ends with the last mark, and no token is generated twice."""
        self._leave(LEAVING_MARK)

    def _leave(self, mark: bytes) -> None:
        is_told = self._record.left_for_s() < LEAVES_SILENCE_AFTER_S
        if is_told or self._ended or not (self._chunked and self._record.can_continue):
            return
        self._record.leave()
        self.is_leaving = True
        self._client.write(chunk(mark + b"\n"))
        self._govern_engine()
        asyncio.get_running_loop().call_later(LEAVES_WITHIN_S, self._stay)

    def _stay(self) -> None:
        self.is_leaving = False
        if not self._ended:
            self._govern_engine()
            self._cell.departures.stayed(self)

    @contained
    def cut(self, refusal: Refusal) -> None:
        self._fail(refusal, RequestOutcome.ENGINE_ERROR)

    # --- to the engine ---

    def _start(self) -> None:
        self._started = True
        self._record.trace()
        try:
            self._record.metadata = read_metadata(self._head.named, time())
            refusal = self._cell.refusal(self._record.metadata)
        except BadHeader as error:
            refusal = error.refusal
        if refusal is not None:
            self._fail(refusal, RequestOutcome.REFUSED)
            return
        self._cell.enter(self, self._ingress)
        self._is_batch = self._record.metadata.serving_class is ServingClass.BATCH
        if self._is_batch:
            self._cell.batch.join(self)
        self._record.admit()
        if (time_left_s := self._record.metadata.time_left_s) is not None:
            late = (refusals.deadline_passed(), RequestOutcome.TOO_LATE)
            self._deadline = asyncio.get_running_loop().call_later(time_left_s, self._fail, *late)
        if self._head.expects_continue and not self._upload.complete:
            self._client.write(CONTINUE)

    def _send(self) -> None:
        prepared = prepare(self._head, self._upload, self._record.metadata, self._cell.settings)
        if isinstance(prepared, Refusal):
            self._fail(prepared, RequestOutcome.REFUSED)
            return
        if (refusal := self._cell.weigh(self, self._record.metadata.serving_class, prepared.sequences)) is not None:
            self._fail(refusal, RequestOutcome.REFUSED)
            return
        self._hides_usage = prepared.removes_usage
        if (limit := self._cell.settings.max_prompt_tokens) is None:
            self._to_engine()
        else:
            self._task = asyncio.get_running_loop().create_task(self._send_if_short(limit))

    @contained_task
    async def _send_if_short(self, limit: int) -> None:
        cell, body = self._cell, self._upload.whole()
        try:
            refusal = await why_prompt_is_refused(cell.pool, limit, cell.settings.model, self._head.path, body)
        except OSError as error:
            self._task = None
            self._fail(refusals.engine_unreachable(f"it does not count tokens: {error}"), RequestOutcome.ENGINE_ERROR)
            return
        self._task = None
        if refusal is None:
            self._to_engine()
        else:
            self._fail(refusal, RequestOutcome.REFUSED)

    def _to_engine(self) -> None:
        if not self._is_batch or self._cell.batch.may_begin(self):
            self.begin()

    @contained
    def begin(self) -> None:
        """Sends the request to the engine, after a prefill cell has read the prompt if one is to."""
        metadata = self._record.metadata
        if metadata.replayed is None:  # tokens of another cell are no part of a prompt that a prefill cell could read
            self._handover = self._cell.handovers.begin(self._head, self._upload.whole(), metadata)
        if self._handover is None:
            self._take_connection()
        else:
            self._task = asyncio.get_running_loop().create_task(self._send_handed_over(self._handover))

    @contained_task
    async def _send_handed_over(self, handover: Handover) -> None:
        self._upload.add_members(await handover.read())
        self._record.cached_elsewhere = handover.cached_tokens
        self._task = None
        self._take_connection()

    def _take_connection(self) -> None:
        connection = self._cell.pool.take() if self._upload.repeatable else None
        if connection is None:
            self._connect()
        else:
            self._send_on(connection)

    def _connect(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._send_on_new())

    @contained_task
    async def _send_on_new(self) -> None:
        try:
            connection = await self._cell.pool.connect()
        except OSError as error:
            reason = str(error) or "no connection in time"
            self._task = None
            self._cell.request_probe()
            self._fail(refusals.engine_unreachable(reason), RequestOutcome.ENGINE_ERROR)
            return
        self._task = None
        self._send_on(connection)

    def _send_on(self, connection: EngineConnection) -> None:
        self._connection = connection
        self._record.sent_at = monotonic()
        self._head.exchange = self._cell.next_exchange()
        self._cell.cache.begin(self._head.exchange, self._record.metadata.prefixes)
        connection.receiver = self
        connection.write(self._upload.opening(self._cell.pool.host_header))
        if self._is_batch and self._cell.batch.reads_one:
            self._stop_reading()
            self._reading = asyncio.get_running_loop().create_task(self._await_prompt_read(self._head.exchange))

    @contained_task
    async def _await_prompt_read(self, exchange: bytes) -> None:
        """An answer that is no stream has no bytes until its end, so the engine is queried. If it cannot tell, the
        prompt gets the usual time to first token."""
        if not await prompt_is_read(self._cell.pool, exchange):
            await asyncio.sleep(self._cell.meter.ttft_p50_s(monotonic()) or self._limits.unknown_reading_s)
        self._cell.batch.read(self)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    # --- Receiver: from the engine ---

    @contained
    def upstream_received(self, head: ResponseHead | None, body: bytes, *, complete: bool) -> None:
        self._last_byte_at = monotonic()
        if head is not None:
            self._response = head
        response = self._response
        if response is None or not (self._response_begun or body or complete):
            return
        if response.status >= 400 and not (self._response_begun or response.is_stream):
            self._error = self._error or ErrorAnswer(self._head.path)
            self._error.add(body)
            if not complete:
                return
            response, body = self._error.in_form(response)
            self._response = response
        if not self._response_begun and (response.status >= 500 or (response.is_stream and is_error_event(body))):
            self._delay_response(response, body, complete=complete)
        else:
            self._forward(response, body, complete=complete)

    @contained
    def upstream_failed(self, fault: UpstreamFault, reason: str) -> None:
        connection, self._connection = self._connection, None
        if self._verifying:
            self._engine_failure = reason
        elif fault is UpstreamFault.MALFORMED:
            self._fail(refusals.engine_malformed(reason), RequestOutcome.ENGINE_ERROR)
        elif connection is not None and connection.used_before and self._response is None:
            self._connect()  # an engine can close an idle connection just when it is used again
        elif self._response_begun:
            self._cell.request_probe()
            self._engine_failed(reason)
        else:
            self._task = asyncio.get_running_loop().create_task(self._answer_for_drop(reason))

    @contained_task
    async def _answer_for_drop(self, reason: str) -> None:
        """The engine closed the connection without a byte. If it died, another cell may take the request. If it is
        healthy, the request caused that, and would do so elsewhere."""
        is_well = await self._cell.is_engine_well()
        self._task = None
        if is_well:
            self._fail(refusals.engine_dropped(reason), RequestOutcome.ENGINE_ERROR)
        else:
            self._engine_failed(reason)

    # --- verification: a response that begins with an error may come from an engine that is failing ---

    def _delay_response(self, response: ResponseHead, body: bytes, *, complete: bool) -> None:
        """Delays the answer until it is known whether the engine itself is failing."""
        self._verifying = True
        self._govern_engine()
        self._task = asyncio.get_running_loop().create_task(self._verify_engine(response, body, complete=complete))

    @contained_task
    async def _verify_engine(self, response: ResponseHead, body: bytes, *, complete: bool) -> None:
        healthy = await self._cell.check_health()
        self._task = None
        self._verifying = False
        if not healthy:
            self._engine_failed(self._cell.health.reason)
            return
        self._forward(response, body, complete=complete)
        if self._engine_failure and not complete:
            self._engine_failed(self._engine_failure)
        else:
            self._govern_engine()

    # --- to the client ---

    def _forward(self, response: ResponseHead, body: bytes, *, complete: bool) -> None:
        self._record.add(response, body, self._last_byte_at, complete=complete)
        if self._is_batch:
            self._cell.batch.read(self)
        if self._rewrite is None:
            streaming = response.is_stream and response.content_length is None
            marked = self._record.metadata.is_marked
            self._rewrite = answer_rewrite(
                self._head.path, streaming=streaming, hides_usage=self._hides_usage, marks_errors=marked
            )
        shown = self._rewrite.filter(body, complete=complete)
        if not (shown or complete or self._response_begun):
            return  # an incomplete event: the answer begins with its end
        opening = b"" if self._response_begun else self._open(response)
        framed = chunk(shown) if self._chunked else shown
        if opening or complete:
            framed = b"%b%b%b" % (opening, framed, LAST_CHUNK if complete and self._chunked else b"")
        self._client.write(framed)
        if complete:
            self._finish(response)
        elif opening and self._cell.phase is not Phase.SERVE:
            self._cell.departures.add(self)

    def _open(self, response: ResponseHead) -> bytes:
        """Begins the answer. From here on the request cannot be repeated."""
        self._response_begun = True
        if self._handover is not None:
            self._handover.answered()
        self._upload.forget()
        own = [*self._own_headers(), *self._record.token_headers(), self._record.timing_header(self._last_byte_at)]
        if response.status == 503:
            own.append(RETRY_HEADER)
        self._keep_alive = self._client.may_keep_alive()
        if response.content_length is not None and not response.bodiless:
            own.append((b"content-length", b"%d" % response.content_length))
        elif not response.bodiless and self._head.http11:
            own.append((b"transfer-encoding", b"chunked"))
            self._chunked = True
        return response_head(response, own, keep_alive=self._keep_alive)

    def _own_headers(self) -> Headers:
        return [(b"x-switchyard-cell", self._cell.cell_header), (b"x-request-id", self._head.request_id)]

    def _finish(self, response: ResponseHead) -> None:
        self._stop_clock()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()
        self._ended = True
        self._cell.leave(self)
        try:  # `reported` would take 1 µs of each request
            self._record.complete(response, passed_on=self._rewrite is not None and self._rewrite.is_broken)
        except Exception as error:
            report("RequestRecord.complete", error)
        self._client.answered(keep_alive=self._keep_alive)

    def _engine_failed(self, reason: str) -> None:
        refusal = refusals.engine_died_midway(reason) if self._response_begun else refusals.engine_died(reason)
        self._fail(refusal, RequestOutcome.ENGINE_ERROR)

    def _fail(self, refusal: Refusal, outcome: RequestOutcome) -> bool:
        """Ends with an error: as an answer, as an event of the stream, or by breaking the connection. Returns False if
        the request had already ended."""
        if self._ended:
            return False
        response = self._response if self._response_begun else None
        passes_on = outcome in _BROKEN and self._passes_on()
        self._close_with(
            outcome, refusal.status if response is None else response.status, refusal.code, passed_on=passes_on
        )
        if response is None:
            keep_alive = self._client.may_keep_alive()
            own, reply = self._own_headers(), refusal_response(refusal, self._error_form)
            self._client.write(response_bytes(reply, own, keep_alive=keep_alive))
            self._client.answered(keep_alive=keep_alive)
        elif self._rewrite is not None and response.is_stream and response.content_length is None:
            event = self._rewrite.failure(refusal, at_boundary=self._record.at_event_boundary)
            if passes_on:
                event = b"\n\n" + broken_mark(refusal.code) + event.lstrip(b"\n")
            self._client.write(chunk(event) + LAST_CHUNK if self._chunked else event)
            self._client.answered(keep_alive=False)
        else:
            self._client.abort()
        return True

    def _passes_on(self) -> bool:
        """Whether the relay continues this stream at another cell, or counts its failure."""
        metadata, response = self._record.metadata, self._response
        if not self._response_begun or response is None:
            return metadata.replayed is not None
        return metadata.is_marked and response.is_stream and response.content_length is None

    def _close_with(self, outcome: RequestOutcome, status: int, reason: str = "", *, passed_on: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._stop_clock()
        if self._task is not None:
            self._task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._cell.leave(self)
        with reported("RequestRecord.close"):
            self._record.close(outcome, status, reason, passed_on=passed_on)

    def _stop_clock(self) -> None:
        self._stop_reading()
        if self._handover is not None:
            self._handover.close()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
