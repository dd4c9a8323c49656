"""The record of one request: times, tokens, outcome. It feeds the meter and the engine's health while the response
passes, and the access log at the end. If the answer did not state its usage, it queries the engine first. It never
changes bytes."""

from enum import StrEnum
from random import getrandbits
from time import monotonic, time, time_ns

import msgspec
from msgspec import structs

from engine_agent.cell_proxy.admission import RequestMetadata, waited_at_ingress_s
from engine_agent.cell_proxy.api_paths import counting_of
from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.engine_counters import fetch_usage
from engine_agent.cell_proxy.marks import MarkCount, fresh
from engine_agent.cell_proxy.meter import ClassMeter, Usage
from engine_agent.cell_proxy.rewrite import Upload
from engine_agent.cell_proxy.usage_reader import TokenCount
from engine_agent.cell_proxy.usage_rows import UsageCounts
from engine_agent.cell_proxy.wire import COMPLETION_TOKENS_HEADER, Headers, RequestHead, ResponseHead
from engine_agent.protocol.api_surface import Counting
from engine_agent.protocol.proxy_messages import PREFIX_DIGITS, PROMPT_TOKENS_HEADER
from engine_agent.protocol.request_messages import RequestSample, SampleKind
from engine_agent.protocol.tracing import TRACEPARENT, SpanContext, begin_span, span_json, trace_of, with_context


class RequestOutcome(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"
    ENGINE_ERROR = "engine_error"
    CLIENT_GONE = "client_gone"
    TOO_LATE = "too_late"
    MOVED = "moved"
    PROXY_ERROR = "proxy_error"


_REFUSED, _ENGINE_ERROR, _CLIENT_GONE = RequestOutcome.REFUSED, RequestOutcome.ENGINE_ERROR, RequestOutcome.CLIENT_GONE
_ANSWERED, _NOT_COUNTED = RequestOutcome.ANSWERED, Counting.NOTHING
_FAILED = frozenset({RequestOutcome.ENGINE_ERROR, RequestOutcome.PROXY_ERROR})
_CANCELLED = frozenset({RequestOutcome.CLIENT_GONE, RequestOutcome.TOO_LATE})
CLIENT_GONE_STATUS = 499
"""The usual status in logs (nginx) for a client that disconnected before its answer. It is never sent."""
RETRIED_STATUS = 503
"""The ingress tries another cell after it."""
NO_USAGE = Usage(0, 0)
MOVES_WITHIN_S = 31.0
"""A little longer than a relay looks for another cell (`engine_agent.relay.continuable.CONTINUES_WITHIN_S`)."""
_NO_ANSWER = TokenCount(Counting.NOTHING, streaming=False)
"""Of requests without an answer so far. Nothing is added to it."""
MAX_NAME_CHARS = 64
MOST_MS = 1e9
_MAX_DIGITS = 9


class Ending(msgspec.Struct, frozen=True):
    """How a request ended. `status`: the one that its client saw, or would have seen; `reason`: the code of a
    refusal. `passed_on`: the relay continues the stream elsewhere, or counts its failure."""

    outcome: RequestOutcome
    status: int
    reason: str
    duration_s: float
    passed_on: bool = False


class RequestRecord:
    def __init__(self, cell: Cell, head: RequestHead, upload: Upload, ingress: str = "") -> None:
        self._cell = cell
        self._ingress = ingress
        self._in_flight = 0
        self._head = head
        self._upload = upload
        self._row: UsageCounts | None = None
        self.metadata = RequestMetadata()
        self.cached_elsewhere: int | None = None
        """Tokens of its prompt that were in the cache of the prefill cell that read it; None if none did."""
        self._left_at = -MOVES_WITHIN_S
        """When its stream was told to continue at another cell."""
        self._left_usage = NO_USAGE
        self._marks: MarkCount | None = None
        self._counting = counting_of(head.method, head.path)
        self._tokens = _NO_ANSWER
        self._meter: ClassMeter | None = None
        self._response: ResponseHead | None = None
        self._ttft_s: float | None = None
        self._last_token_at = 0.0
        self.began_at = self.sent_at = monotonic()
        """When the request arrived, and when it was sent to the engine."""
        self._began_ns = 0
        self._span: SpanContext | None = None

    @property
    def at_event_boundary(self) -> bool:
        """Whether another event can be inserted into the stream here."""
        return self._tokens.at_boundary

    def admit(self) -> None:
        self._row = self._cell.meter.admitted(self.metadata)
        self._meter = self._cell.meter.of(self.metadata.serving_class)
        self._in_flight = len(self._cell.in_flight)

    def trace(self) -> None:
        """Starts the span of the request, if it is traced, with the engine's work as a part of it."""
        spans = self._cell.spans
        if spans is None:
            return
        self._began_ns = time_ns()
        self._span = begin_span(self._head.headers, spans.settings.ratio, getrandbits)
        if self._span is not None:
            self._head.headers = with_context(self._head.headers, self._span)

    def add(self, response: ResponseHead, body: bytes, now: float, *, complete: bool) -> None:
        """A piece of the answer passes. `complete`: it is the last."""
        if self._response is None:
            self._response = response
            if (prompt := self._prompt_from_head()) is not None:
                self._cell.cache.count(self._head.exchange, prompt)
            self._tokens = TokenCount(self._counting, streaming=response.is_stream and response.status < 400)
            self._marks = MarkCount() if self.metadata.is_marked and response.is_stream else None
        if self._marks is not None:
            self._marks.add(body)
        events = self._tokens.add(body, complete=complete)
        if not events:
            return
        meter, cell = self._meter, self._cell
        if self._ttft_s is None:
            self._ttft_s = now - self.began_at
            if meter is not None and self.metadata.replayed is None:  # its client has had its first token
                meter.ttft.record(now, self._ttft_s)
        elif meter is not None:
            meter.itl.record(now, now - self._last_token_at)
        self._last_token_at = now
        cell.meter.tokens(now, events)
        cell.health.token_seen(now)

    def token_headers(self) -> Headers:
        """The known tokens of the request when the head of its answer is sent."""
        reported = self._tokens.reported
        if reported is not None:
            return [
                (PROMPT_TOKENS_HEADER, b"%d" % reported.prompt),
                (COMPLETION_TOKENS_HEADER, b"%d" % reported.completion),
            ]
        prompt = self._prompt_from_head()
        return [] if prompt is None else [(PROMPT_TOKENS_HEADER, b"%d" % prompt)]

    def timing_header(self, first_byte_at: float) -> tuple[bytes, bytes]:
        """Milliseconds in the proxy until the engine got the request, and from there until the first byte of its
        answer (https://www.w3.org/TR/server-timing/)."""
        queued_ms, engine_ms = 1e3 * (self.sent_at - self.began_at), 1e3 * (first_byte_at - self.sent_at)
        return b"server-timing", b"queue;dur=%.1f, engine;dur=%.1f" % (queued_ms, engine_ms)

    def complete(self, response: ResponseHead, *, passed_on: bool = False) -> None:
        """The answer is complete. `passed_on`: its last event is an error that the relay does not show."""
        now = monotonic()
        self._cell.meter.tokens(now, self._tokens.settle() - (self.metadata.replayed or 0))
        failed = response.status >= 500 or self._tokens.errors > 0 or passed_on
        if not failed and (self._tokens.tokens or self._tokens.reported):
            self._cell.health.token_seen(now)
        if failed:
            passed_on = passed_on or (self.metadata.replayed is not None and response.status >= 500)
            self.close(_ENGINE_ERROR, response.status, is_whole=True, passed_on=passed_on)
        else:
            self.close(_ANSWERED, response.status, is_whole=True)

    def close(
        self, outcome: RequestOutcome, status: int, reason: str = "", *, is_whole: bool = False, passed_on: bool = False
    ) -> None:
        """The request has ended. `reason`: the code of a refusal; `is_whole`: its answer is complete. If the engine has
        not reported the usage, it is queried first."""
        ending = Ending(outcome, status, reason, monotonic() - self.began_at, passed_on)
        if self._row is None:
            if outcome is _REFUSED:
                self._cell.meter.refused(self.metadata, reason)
            self._write(ending, NO_USAGE)
            return
        self._cell.meter.ended(
            self.metadata,
            self._row,
            status=status,
            failed=outcome in _FAILED,
            passed_on=passed_on,
            cancelled=outcome in _CANCELLED,
        )
        if self._is_to_be_asked_for(ending, is_whole=is_whole):
            self._cell.settle_later(self._ask_and_settle(self._row, ending))
        else:
            moved = outcome is RequestOutcome.MOVED
            self._settle(self._row, ending, self._left_usage if moved else self._known_usage())

    def _known_usage(self) -> Usage:
        """What the answer states: its usage, or else its marks."""
        reported = self._tokens.reported
        if reported is not None:
            return Usage(reported.prompt, reported.completion, reported.cached)
        return NO_USAGE if self._marks is None else self._marks.usage()

    @property
    def has_left(self) -> bool:
        """The relay was told that the stream may continue elsewhere, and may do so."""
        return self.left_for_s() < MOVES_WITHIN_S

    def left_for_s(self) -> float:
        """Seconds since the relay was told."""
        return monotonic() - self._left_at

    def leave(self) -> None:
        """The relay gets a notice. A stream that continues elsewhere does so from here, whatever is sent meanwhile."""
        self._left_at = monotonic()
        self._left_usage = NO_USAGE if self._marks is None else self._marks.usage()

    @property
    def can_continue(self) -> bool:
        """Whether another cell can continue from the last mark, whatever this engine has computed since."""
        return self._marks is not None and self._marks.prompt is not None

    def _is_to_be_asked_for(self, ending: "Ending", *, is_whole: bool) -> bool:
        """Whether the engine may have computed tokens that it did not report."""
        if self._tokens.reported is not None or self._counting is _NOT_COUNTED or not self._head.exchange:
            return False
        if self.can_continue and (self.has_left or ending.outcome is RequestOutcome.ENGINE_ERROR):
            return False
        return ending.status < 400 if is_whole else ending.outcome is not _REFUSED

    async def _ask_and_settle(self, row: UsageCounts, ending: "Ending") -> None:
        reported = await fetch_usage(self._cell.pool, self._head.exchange)
        self._cell.meter.unreported_total += reported is None
        if reported is None:
            self._settle(row, ending, self._estimate(ending))
        else:  # the engine counts what it generated, without the repeated tokens
            repeated = self.metadata.replayed or 0
            self._settle(row, ending, Usage(reported.prompt, reported.completion + repeated, reported.cached))

    def _estimate(self, ending: "Ending") -> Usage:
        """Estimates unreported usage: the tokens that arrived, and the prompt if the engine stated its length. An
        engine that failed before it answered has used nothing that counts."""
        if ending.outcome is _ENGINE_ERROR and self._response is None:
            return NO_USAGE
        return Usage(self._prompt_from_head(), self._tokens.tokens, estimated=True)

    def _prompt_from_head(self) -> int | None:
        for name, value in self._response.headers if self._response is not None else ():
            if name == PROMPT_TOKENS_HEADER and len(value) <= _MAX_DIGITS and value.isdigit():
                return int(value)
        return None

    def _settle(self, row: UsageCounts, ending: "Ending", usage: Usage) -> None:
        if self.cached_elsewhere is not None:  # its engine counts all tokens from the prefill cell as cached
            usage = structs.replace(usage, cached=min(usage.cached, self.cached_elsewhere))
        counted = self._cell.meter.settled(
            self.metadata, row, fresh(usage, self.metadata.counted), body_bytes=self._upload.size_bytes
        )
        if self.metadata.replayed is not None:  # its cached tokens are those of the first run
            self._count_replay(self.metadata.replayed, usage)
            self._cell.cache.settle(self._head.exchange, self.metadata, None, 0)
        elif not usage.estimated:
            self._cell.cache.settle(self._head.exchange, self.metadata, usage.prompt, usage.cached)
        self._write(ending, counted)

    def _count_replay(self, replayed: int, usage: Usage) -> None:
        """Notes how the engine's counters differ from what this cell counts. An engine that failed has read nothing."""
        meter, counted = self._cell.meter, self.metadata.counted
        if usage.prompt:
            meter.replayed_total += replayed if counted is None else replayed + usage.prompt
            meter.recounted_total += max(0, min(replayed, usage.completion) - (counted or 0))

    def _write(self, ending: "Ending", usage: Usage) -> None:
        if self._span is not None:
            self._export(self._span, ending, usage)
        self._sample(ending, usage)
        if not self._cell.log.requests:
            return
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

    def _sample(self, ending: Ending, usage: Usage) -> None:
        """Offers the request to the samples. Those whose clients left or that generate nothing are of no use there."""
        if self._head.method != b"POST" or ending.outcome is _CLIENT_GONE:
            return
        now = time()
        if ending.status >= 400 or ending.outcome is not _ANSWERED:
            self._cell.samples.failed(now, self.metadata.tenant, lambda: self._described(now, ending, usage))
        elif self._counting is not _NOT_COUNTED:
            first_ms = 1000 * (ending.duration_s if self._ttft_s is None else self._ttft_s)
            is_stream = self._response is not None and self._response.is_stream
            describe = lambda: self._described(now, ending, usage)  # noqa: E731 - made only if it is kept
            self._cell.samples.answered(now, first_ms, describe, is_stream=is_stream, trace=self._client_trace())

    def _client_trace(self) -> str:
        began_here = self._span is not None and not self._span.parent_id
        return "" if began_here or TRACEPARENT not in self._head.named else trace_of(self._head.headers)

    def _described(self, now: float, ending: Ending, usage: Usage) -> RequestSample:
        metadata, began_at = self.metadata, now - (monotonic() - self.began_at)
        response, prefixes = self._response, metadata.prefixes.prefixes if metadata.prefixes is not None else ()
        waited_s = waited_at_ingress_s(self._head.named, began_at)
        return RequestSample(
            request=self._head.request_id.decode("latin-1"),
            at=round(began_at, 3),
            kind=SampleKind.UNIFORM,
            status=ending.status,
            total_ms=_milliseconds(ending.duration_s),
            tenant=metadata.tenant,
            key=metadata.key,
            serving_class=metadata.serving_class,
            adapter=metadata.adapter[:MAX_NAME_CHARS],
            path=self._head.path.decode("latin-1")[:MAX_NAME_CHARS],
            ingress=self._ingress,
            prefix=f"{prefixes[min(1, len(prefixes) - 1)]:0{PREFIX_DIGITS}x}" if prefixes else "",
            reason=ending.reason[:MAX_NAME_CHARS],
            is_stream=response is not None and response.is_stream,
            is_handed_over=self.cached_elsewhere is not None,
            is_handed_back=ending.status == RETRIED_STATUS or ending.passed_on,
            in_flight=self._in_flight,
            prompt_tokens=max(0, usage.prompt or 0),
            cached_tokens=max(0, usage.cached),
            completion_tokens=max(0, usage.completion),
            ingress_ms=None if waited_s is None else _milliseconds(waited_s),
            queue_ms=_milliseconds(self.sent_at - self.began_at) if self._head.exchange else None,
            first_ms=None if self._ttft_s is None else _milliseconds(self._ttft_s),
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


def _milliseconds(value_s: float) -> float:
    return round(min(max(value_s * 1000, 0.0), MOST_MS), 2)
