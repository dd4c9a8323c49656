"""The record of one request: times, tokens, outcome. It feeds the meter and the health judge while the response passes,
and the access log once at the end. It never touches the bytes."""

from enum import StrEnum
from random import getrandbits
from time import monotonic, time_ns

from engine_agent.protocol.tracing import SpanContext, begin_span, span_json, with_context
from engine_agent.proxy.admission import RequestMetadata
from engine_agent.proxy.cell import Cell
from engine_agent.proxy.meter import Usage
from engine_agent.proxy.tokens import TokenCount
from engine_agent.proxy.upload import Upload
from engine_agent.proxy.usage_rows import UsageCounts
from engine_agent.proxy.wire import RequestHead, ResponseHead


class RequestOutcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    ENGINE_ERROR = "engine_error"
    CLIENT_GONE = "client_gone"
    TOO_LATE = "too_late"


CLIENT_GONE_STATUS = 499
"""What logs commonly show (nginx) for a client that left before its answer began; it is never sent."""


class RequestRecord:
    """What is known about one request while it runs."""

    def __init__(self, cell: Cell, head: RequestHead, upload: Upload) -> None:
        self._cell = cell
        self._head = head
        self._upload = upload
        self._row: UsageCounts | None = None
        """None until admitted."""
        self.metadata = RequestMetadata()
        self._tokens = TokenCount(streaming=False)
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

    def open(self, response: ResponseHead) -> None:
        """The answer begins."""
        self._tokens = TokenCount(streaming=response.is_stream and response.status < 400)

    def add(self, body: bytes, now: float) -> None:
        """A piece of the answer passes."""
        events = self._tokens.add(body)
        if not events:
            return
        meter = self._cell.meter
        if self._ttft_s is None:
            self._ttft_s = now - self.began_at
            meter.first_token(now, self._ttft_s, self.metadata.serving_class)
        else:
            meter.next_tokens(now, now - self._last_token_at)
        self._last_token_at = now
        meter.tokens(now, events)
        self._cell.judge.token_seen(now)

    def complete(self, response: ResponseHead) -> None:
        """The answer is whole."""
        now = monotonic()
        self._cell.meter.tokens(now, self._tokens.settle())
        failed = response.status >= 500 or self._tokens.errors > 0
        if not failed and self._tokens.tokens > 0:
            self._cell.judge.token_seen(now)
        self.close(RequestOutcome.ENGINE_ERROR if failed else RequestOutcome.ANSWERED, response.status)

    def close(self, outcome: RequestOutcome, status: int, reason: str = "") -> None:
        """The request has ended, one way or another; `reason` is the code of a refusal."""
        if self._row is not None:
            self._settle(self._row, outcome, status)
        elif outcome is RequestOutcome.REFUSED:
            self._cell.meter.refused(self.metadata, reason)
        if self._span is not None:
            self._export(self._span, outcome, status, reason)
        self._cell.log.request(
            event="request",
            request_id=self._head.request_id.decode("latin-1"),
            method=self._head.method.decode("latin-1"),
            path=self._head.path.decode("latin-1"),
            status=status,
            outcome=outcome,
            reason=reason,
            serving_class=self.metadata.serving_class,
            tenant=self.metadata.tenant,
            ttft_ms=None if self._ttft_s is None else round(self._ttft_s * 1000, 2),
            prompt_tokens=self._tokens.prompt_tokens,
            tokens=self._tokens.tokens,
            duration_ms=round((monotonic() - self.began_at) * 1000, 2),
        )

    def _export(self, span: SpanContext, outcome: RequestOutcome, status: int, reason: str) -> None:
        attributes = {
            "http.request.method": self._head.method.decode("latin-1"),
            "url.path": self._head.path.decode("latin-1"),
            "http.response.status_code": status,
            "gen_ai.usage.input_tokens": self._tokens.prompt_tokens,
            "gen_ai.usage.output_tokens": self._tokens.tokens,
            "switchyard.class": self.metadata.serving_class.value,
            "switchyard.tenant": self.metadata.tenant,
            "switchyard.outcome": outcome.value,
            "switchyard.reason": reason,
            "switchyard.request_id": self._head.request_id.decode("latin-1"),
            "switchyard.ttft_s": self._ttft_s,
        }
        name = f"{attributes['http.request.method']} {attributes['url.path']}"
        failed = outcome is RequestOutcome.ENGINE_ERROR or status >= 500
        if self._cell.spans is not None:
            self._cell.spans.add(span_json(span, name, self._began_ns, time_ns(), failed, **attributes))

    def _settle(self, row: UsageCounts, outcome: RequestOutcome, status: int) -> None:
        prompt = self._tokens.prompt_tokens
        cancelled = outcome in {RequestOutcome.CLIENT_GONE, RequestOutcome.TOO_LATE}
        charged = cancelled or (outcome is RequestOutcome.ANSWERED and status < 400)
        self._cell.meter.finished(
            self.metadata,
            row,
            Usage(
                prompt if charged or prompt is not None else 0,
                self._tokens.tokens,
                estimated=charged and prompt is None,
            ),
            status=status,
            failed=outcome is RequestOutcome.ENGINE_ERROR,
            cancelled=cancelled,
            body_bytes=self._upload.size_bytes,
        )
