"""The record of one request: times, tokens, outcome. It feeds the meter and the health judge while the response passes,
and the access log once at the end; before that it has the engine say what was used, if the answer did not. It never
touches the bytes."""

from dataclasses import dataclass, replace
from enum import StrEnum
from random import getrandbits
from time import monotonic, time_ns

from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.api_paths import counting_of
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.engine_usage import fetch_usage
from engine_agent.cell_proxy.meter import Usage
from engine_agent.cell_proxy.tokens import TokenCount
from engine_agent.cell_proxy.upload import Upload
from engine_agent.cell_proxy.usage_rows import UsageCounts
from engine_agent.cell_proxy.wire import COMPLETION_TOKENS_HEADER, Headers, RequestHead, ResponseHead
from engine_agent.protocol.api_surface import Counting
from engine_agent.protocol.proxy_messages import PROMPT_TOKENS_HEADER
from engine_agent.protocol.tracing import SpanContext, begin_span, span_json, with_context


class RequestOutcome(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"
    ENGINE_ERROR = "engine_error"
    CLIENT_GONE = "client_gone"
    TOO_LATE = "too_late"
    PROXY_ERROR = "proxy_error"


CLIENT_GONE_STATUS = 499
"""What logs commonly show (nginx) for a client that left before its answer began; it is never sent."""
NO_USAGE = Usage(0, 0)
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: `status` that its client saw, or would have; `reason` is the code of a refusal."""

    outcome: RequestOutcome
    status: int
    reason: str
    duration_s: float


class RequestRecord:
    """What is known about one request while it runs."""

    def __init__(self, cell: Cell, head: RequestHead, upload: Upload) -> None:
        self._cell = cell
        self._head = head
        self._upload = upload
        self._row: UsageCounts | None = None
        """None until admitted."""
        self.metadata = RequestMetadata()
        self.cached_elsewhere: int | None = None
        """Tokens of its prompt that the prefill cell which read it had; None: none read it."""
        self._counting = counting_of(head.method, head.path)
        self._tokens = TokenCount(self._counting, streaming=False)
        self._response: ResponseHead | None = None
        self._ttft_s: float | None = None
        self._last_token_at = 0.0
        self.began_at = monotonic()
        self._began_ns = 0
        self._span: SpanContext | None = None

    @property
    def at_event_boundary(self) -> bool:
        """Where another event may be put into the stream."""
        return self._tokens.at_boundary

    def admit(self) -> None:
        self._row = self._cell.meter.admitted(self.metadata)

    def trace(self) -> None:
        """Begin the span of the request, where it has one, and make the engine's work a part of it."""
        spans = self._cell.spans
        if spans is None:
            return
        self._began_ns = time_ns()
        self._span = begin_span(self._head.headers, spans.settings.ratio, getrandbits)
        if self._span is not None:
            self._head.headers = with_context(self._head.headers, self._span)

    def add(self, response: ResponseHead, body: bytes, now: float, *, complete: bool) -> None:
        """A piece of the answer passes; `complete` with the last."""
        if self._response is None:
            self._response = response
            if (prompt := self._prompt_from_head()) is not None:
                self._cell.cache.count(self._head.exchange, prompt)
            self._tokens = TokenCount(self._counting, streaming=response.is_stream and response.status < 400)
        events = self._tokens.add(body, complete=complete)
        if not events:
            return
        meter = self._cell.meter
        if self._ttft_s is None:
            self._ttft_s = now - self.began_at
            meter.first_token(now, self._ttft_s, self.metadata.serving_class)
        else:
            meter.next_tokens(now, now - self._last_token_at, self.metadata.serving_class)
        self._last_token_at = now
        meter.tokens(now, events)
        self._cell.judge.token_seen(now)

    def token_headers(self) -> Headers:
        """What is known of the request's tokens when the head of its answer leaves."""
        told = self._tokens.told
        if told is not None:
            return [(PROMPT_TOKENS_HEADER, b"%d" % told.prompt), (COMPLETION_TOKENS_HEADER, b"%d" % told.completion)]
        prompt = self._prompt_from_head()
        return [] if prompt is None else [(PROMPT_TOKENS_HEADER, b"%d" % prompt)]

    def complete(self, response: ResponseHead) -> None:
        now = monotonic()
        self._cell.meter.tokens(now, self._tokens.settle())
        failed = response.status >= 500 or self._tokens.errors > 0
        if not failed and (self._tokens.tokens or self._tokens.told):
            self._cell.judge.token_seen(now)
        self.close(RequestOutcome.ENGINE_ERROR if failed else RequestOutcome.ANSWERED, response.status, is_whole=True)

    def close(self, outcome: RequestOutcome, status: int, reason: str = "", *, is_whole: bool = False) -> None:
        """The request has ended, one way or another; `reason` is the code of a refusal, `is_whole`: its answer is.
        Where the engine has not said what was used, it is asked first."""
        ending = Ending(outcome, status, reason, monotonic() - self.began_at)
        if self._row is None:
            if outcome is RequestOutcome.REFUSED:
                self._cell.meter.refused(self.metadata, reason)
            self._write(ending, NO_USAGE)
            return
        self._cell.meter.ended(
            self.metadata,
            self._row,
            status=status,
            failed=outcome in {RequestOutcome.ENGINE_ERROR, RequestOutcome.PROXY_ERROR},
            cancelled=outcome in {RequestOutcome.CLIENT_GONE, RequestOutcome.TOO_LATE},
        )
        if self._is_to_be_asked_for(ending, is_whole=is_whole):
            self._cell.settle_later(self._ask_and_settle(self._row, ending))
        else:
            told = self._tokens.told
            self._settle(
                self._row, ending, NO_USAGE if told is None else Usage(told.prompt, told.completion, told.cached)
            )

    def _is_to_be_asked_for(self, ending: "Ending", *, is_whole: bool) -> bool:
        """Whether the engine computed something that it did not speak of."""
        if self._tokens.told is not None or self._counting is Counting.NOTHING or not self._head.exchange:
            return False
        return ending.status < 400 if is_whole else ending.outcome is not RequestOutcome.REFUSED

    async def _ask_and_settle(self, row: UsageCounts, ending: "Ending") -> None:
        told = await fetch_usage(self._cell.pool, self._head.exchange)
        self._cell.meter.untold_total += told is None
        usage = self._estimate(ending) if told is None else Usage(told.prompt, told.completion, told.cached)
        self._settle(row, ending, usage)

    def _estimate(self, ending: "Ending") -> Usage:
        """Where no engine says: what came, and as much of a prompt as it had said, or as bodies of that length have. An
        engine that failed before it answered has used nothing that counts."""
        if ending.outcome is RequestOutcome.ENGINE_ERROR and self._response is None:
            return NO_USAGE
        return Usage(self._prompt_from_head(), self._tokens.tokens, estimated=True)

    def _prompt_from_head(self) -> int | None:
        """The length of the prompt, where the engine said it ahead of the answer."""
        for name, value in self._response.headers if self._response is not None else ():
            if name == PROMPT_TOKENS_HEADER and len(value) <= _MAX_DIGITS and value.isdigit():
                return int(value)
        return None

    def _settle(self, row: UsageCounts, ending: "Ending", usage: Usage) -> None:
        if self.cached_elsewhere is not None:  # its engine counts all that was read elsewhere as cached
            usage = replace(usage, cached=min(usage.cached, self.cached_elsewhere))
        counted = self._cell.meter.settled(self.metadata, row, usage, body_bytes=self._upload.size_bytes)
        if not usage.estimated:
            self._cell.cache.settle(self._head.exchange, self.metadata, usage.prompt, usage.cached)
        self._write(ending, counted)

    def _write(self, ending: "Ending", usage: Usage) -> None:
        """The line in the access log, and the span."""
        if self._span is not None:
            self._export(self._span, ending, usage)
        self._cell.log.request(
            event="request",
            request_id=self._head.request_id.decode("latin-1"),
            method=self._head.method.decode("latin-1"),
            path=self._head.path.decode("latin-1"),
            status=ending.status,
            outcome=ending.outcome,
            reason=ending.reason,
            serving_class=self.metadata.serving_class,
            tenant=self.metadata.tenant,
            ttft_ms=None if self._ttft_s is None else round(self._ttft_s * 1000, 2),
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            tokens=usage.completion,
            estimated=usage.estimated,
            duration_ms=round(ending.duration_s * 1000, 2),
        )

    def _export(self, span: SpanContext, ending: "Ending", usage: Usage) -> None:
        attributes = {
            "http.request.method": self._head.method.decode("latin-1"),
            "url.path": self._head.path.decode("latin-1"),
            "http.response.status_code": ending.status,
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.output_tokens": usage.completion,
            "switchyard.class": self.metadata.serving_class.value,
            "switchyard.tenant": self.metadata.tenant,
            "switchyard.outcome": ending.outcome.value,
            "switchyard.reason": ending.reason,
            "switchyard.request_id": self._head.request_id.decode("latin-1"),
            "switchyard.ttft_s": self._ttft_s,
        }
        name = f"{attributes['http.request.method']} {attributes['url.path']}"
        failed = ending.outcome is RequestOutcome.ENGINE_ERROR or ending.status >= 500
        if self._cell.spans is not None:
            self._cell.spans.add(span_json(span, name, self._began_ns, time_ns(), failed, **attributes))
