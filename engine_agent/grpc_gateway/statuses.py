"""Translates errors of the ingress's HTTP API into gRPC statuses, with the metadata that clients can act on. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import msgspec

STATUSES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the meaning of each status, not by gRPC's table for proxies, which turns 429 into UNAVAILABLE
(https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md)."""
LONGEST_MESSAGE_CHARS: Final = 1000
"""gRPC's clients read 8 KiB of trailers."""
RETURNED_HEADERS: Final = (
    *("x-request-id", "retry-after", "x-switchyard-cell", "x-switchyard-deployment", "x-switchyard-region"),
    *("x-switchyard-ingress", "x-should-retry"),
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)
"""Headers of an answer that become trailing metadata."""
PUSHBACK: Final = "grpc-retry-pushback-ms"
"""gRPC's own clients wait this long before they retry (gRFC A6)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a call that failed."""

    status: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str], ...] = ()

    def details(self) -> dict[str, str]:
        return dict(self.metadata)


def failure_of(http_status: int, headers: Mapping[str, str], body: bytes) -> Failure:
    """The end of a call whose HTTP request had this answer."""
    fallback = grpc.StatusCode.INTERNAL if http_status >= 500 else grpc.StatusCode.INVALID_ARGUMENT
    message, code = _error_text(body, http_status)
    metadata = returned_metadata(headers)
    if code:
        metadata += (("x-switchyard-code", code),)
    if (wait := headers.get("retry-after", "")).isdecimal() and len(wait) < 6:
        metadata += ((PUSHBACK, str(int(wait) * 1000)),)
    return Failure(STATUSES.get(http_status, fallback), message, metadata)


def failure_of_event(error: Mapping[str, Any]) -> Failure:
    """The end of a stream that a cell ended with this error."""
    message = str(error.get("message") or "the answer ended with an error")[:LONGEST_MESSAGE_CHARS]
    code = str(error.get("code") or "")
    is_of_client = error.get("type") == "invalid_request_error"
    status = grpc.StatusCode.INVALID_ARGUMENT if is_of_client else grpc.StatusCode.UNAVAILABLE
    return Failure(status, message, (("x-switchyard-code", _plain(code)),) if code else ())


def returned_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, _plain(headers[name])) for name in RETURNED_HEADERS if name in headers)


def _error_text(body: bytes, http_status: int) -> tuple[str, str]:
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"])[:LONGEST_MESSAGE_CHARS], _plain(str(error.get("code") or ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return f"the ingress answered with HTTP status {http_status}", ""


def _plain(text: str) -> str:
    """Metadata values are printable ASCII."""
    return "".join(character if " " <= character <= "~" else "?" for character in text)[:256]
