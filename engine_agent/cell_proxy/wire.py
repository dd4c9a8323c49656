"""HTTP/1.1 heads and body framing as bytes, for both sides of the proxy. Pure. Hop-by-hop headers end here (RFC 9110
7.6.1), and every body is framed anew, so that both sides agree where a message ends."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from engine_agent.cell_proxy.refusal import ERROR_HEADER, RETRY_AFTER_S, RETRY_HEADER, Refusal, error_body
from engine_agent.protocol.api_surface import ErrorForm
from engine_agent.protocol.continuation import (
    AVOIDED_HEADER,
    CONTINUATION_HEADER,
    COUNTED_HEADER,
    REPLAYED_HEADER,
    VERSION_HEADER,
)
from engine_agent.protocol.proxy_messages import EXCHANGE_HEADER, INGRESS_HEADER

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in order of arrival."""

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_FOR_THE_CELL = {
    b"x-switchyard-adapter",
    b"x-switchyard-arrived-ms",
    AVOIDED_HEADER,
    b"x-switchyard-cache-matched",
    b"x-switchyard-cache-prefixes",
    b"x-switchyard-class",
    CONTINUATION_HEADER,
    COUNTED_HEADER,
    b"x-switchyard-deadline-ms",
    b"x-switchyard-deployment",
    b"x-switchyard-handover",
    EXCHANGE_HEADER,
    b"x-switchyard-hop",
    INGRESS_HEADER,
    b"x-switchyard-key",
    b"x-switchyard-limits",
    b"x-switchyard-model",
    b"x-switchyard-pool",
    REPLAYED_HEADER,
    b"x-switchyard-server",
    b"x-switchyard-tenant",
    VERSION_HEADER,
}
"""Headers from the ingress to the cell. The engine does not get them."""
ENGINE_PRIORITY_HEADER = b"x-vllm-priority"
"""It overrides the priority in the body (vLLM, `GenerateBaseServing._get_priority`), even on paths whose bodies have
none."""
_FOR_THE_ENGINE = {
    ENGINE_PRIORITY_HEADER,
    b"x-data-parallel-rank",
    b"endpoint-load-metrics-format",
    b"x-conversation-id",
}
"""Headers that control vLLM or llama.cpp; only the fleet may use them. By the last one llama.cpp continues an answer
whose client left, and cancels another client's answer of the same name."""
_OF_BROWSERS = {b"origin", b"access-control-request-method", b"access-control-request-headers"}
"""The ingress decides which pages may read an answer (`engine_agent/ingress/haproxy.cfg.j2`)."""
_REQUEST_OWN = (
    _HOP_BY_HOP
    | _FOR_THE_CELL
    | _FOR_THE_ENGINE
    | _OF_BROWSERS
    | {b"content-encoding", b"content-length", b"expect", b"host", b"x-request-id"}
)
COMPLETION_TOKENS_HEADER = b"x-switchyard-completion-tokens"
"""On an answer that was complete before its head was sent: the completion tokens, for the ingress.
`PROMPT_TOKENS_HEADER` has the length of the prompt, also of streams if the engine reports it."""
_PASSED_TO_CLIENTS = frozenset(
    {b"allow", b"cache-control", b"content-encoding", b"content-language", b"content-type", b"date", b"retry-after"}
)
"""Headers of an engine's answer that clients get. All others are dropped: the name and version of the engine, CORS
headers, and names that look like the fleet's."""

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(slots=True)
class RequestHead:
    """A request as its client sent it. `content_length` None: chunked, or no body. `exchange`: the name under which the
    engine records its usage; empty: none."""

    method: bytes
    target: bytes
    headers: Headers
    http11: bool
    keep_alive: bool
    content_length: int | None
    chunked: bool
    expects_continue: bool
    request_id: bytes
    exchange: bytes = b""
    path: bytes = field(init=False)
    named: dict[bytes, bytes] = field(init=False)
    """The headers by name. Of a repeated one, the last."""

    def __post_init__(self) -> None:
        self.path = self.target.partition(b"?")[0]
        self.named = dict(self.headers)


@dataclass(slots=True)
class ResponseHead:
    status: int
    reason: bytes
    headers: Headers
    content_length: int | None
    chunked: bool
    is_stream: bool

    @property
    def bodiless(self) -> bool:
        return self.status in {204, 304}

    @property
    def until_close(self) -> bool:
        return self.content_length is None and not self.chunked and not self.bodiless


@dataclass(frozen=True, slots=True)
class LocalResponse:
    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def length_of(named: Mapping[bytes, bytes]) -> int | None:
    value = named.get(b"content-length")
    return None if value is None else int(value)


def request_head(head: RequestHead, *, host: bytes, framing: bytes, own: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The head that the engine gets. `framing`: one header line, or empty for a request without a body. `own`: headers
    of the proxy."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (head.method, head.target, host)]
    dropped = _REQUEST_OWN | _hop_by_hop(head.headers) if b"connection" in head.named else _REQUEST_OWN
    lines += [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in dropped]
    if head.exchange:
        lines.append(b"%b: %b\r\n" % (EXCHANGE_HEADER, head.exchange))
    lines += [b"%b: %b\r\n" % pair for pair in own]
    lines.append(b"x-request-id: %b\r\n%b\r\n" % (head.request_id, framing))
    return b"".join(lines)


def response_head(head: ResponseHead, own: Headers, *, keep_alive: bool) -> bytes:
    """The head that the client gets for an engine's answer. `own`: headers of the proxy, including the framing."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
    lines += [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] in _PASSED_TO_CLIENTS]
    lines += [b"%b: %b\r\n" % pair for pair in own]
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines)


def response_bytes(reply: LocalResponse, own: Iterable[tuple[bytes, bytes]] = (), *, keep_alive: bool) -> bytes:
    reason = HTTPStatus(reply.status).phrase.encode()
    lines = [b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\n" % (reply.status, reason, reply.content_type)]
    lines += [b"%b: %b\r\n" % pair for pair in (*reply.headers, *own)]
    lines.append(b"content-length: %d\r\n" % len(reply.body))
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    lines.append(reply.body)
    return b"".join(lines)


def refusal_response(refusal: Refusal, form: ErrorForm = ErrorForm.OPENAI) -> LocalResponse:
    """A refusal as an answer, with the header that lets the ingress try another cell, if it may."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if refusal.retry:
        headers = (RETRY_HEADER, (b"retry-after", b"%d" % RETRY_AFTER_S))
    elif refusal.is_final:
        headers = ((b"x-should-retry", b"false"),)
    if refusal.status >= 500:
        headers = (*headers, (ERROR_HEADER, refusal.code.encode()))
    return LocalResponse(refusal.status, error_body(refusal, form), headers=headers)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. Empty for no bytes, because an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _hop_by_hop(headers: Headers) -> set[bytes]:
    """The names that Connection headers declare to be hop-by-hop."""
    values = (value for name, value in headers if name == b"connection")
    return {token.strip().lower() for value in values for token in value.split(b",")}
