"""Parses the bytes of a client into requests, with limits on head, body and everything else. It has no connection and
sends nothing; invalid input becomes a refusal."""

from collections import deque
from random import getrandbits
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.settings import Limits
from engine_agent.cell_proxy.wire import Headers, RequestHead, length_of

_MAX_REQUEST_ID_BYTES = 128


class IncomingRequest:
    """A request whose head is complete. `delivered`: its responder has the whole body."""

    __slots__ = ("complete", "delivered", "head", "pieces", "size_bytes", "too_large")

    def __init__(self, head: RequestHead, *, too_large: bool) -> None:
        self.head = head
        self.pieces: list[bytes] = []
        self.size_bytes = 0
        self.complete = False
        self.delivered = False
        self.too_large = too_large

    def take(self) -> bytes:
        """The body that arrived since the last call."""
        data, self.pieces = b"".join(self.pieces), []
        self.delivered = self.complete
        return data


class RequestParser:
    """The requests of one connection in order. `broken`: the input after the queued ones is invalid."""

    def __init__(self, limits: Limits) -> None:
        self.queue: deque[IncomingRequest] = deque()
        self.broken: Refusal | None = None
        self.in_head = False
        self._limits = limits
        self._max_head_bytes = limits.max_head_bytes
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._arriving: IncomingRequest | None = None
        self._body_bytes = 0
        self._may_be_long = False
        self._begin_head()

    def _begin_head(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._withheld_bytes = 0

    def feed(self, data: bytes) -> None:
        if self.broken is not None or self._parser is None:
            return
        body_bytes = self._body_bytes
        if not self._may_be_long and self._withheld_bytes + len(data) > self._max_head_bytes:
            self._count_heads()
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self.broken = refusals.bad_request("an upgrade to another protocol is not possible here")
        except HttpParserError as error:
            too_long = self._head_bytes > self._limits.max_head_bytes
            self.broken = self._head_too_large() if too_long else refusals.bad_request(str(error))
        if self.broken is not None:
            return
        if self._body_bytes == body_bytes and self._is_within_message():
            # Incomplete headers and trailers are the only input that the parser keeps.
            self._withheld_bytes += len(data)
            if self._withheld_bytes > self._limits.max_head_bytes:
                self.broken = self._head_too_large()

    def _count_heads(self) -> None:
        """From here on: there are enough bytes for a head that is too long."""
        self._may_be_long = True
        self._head_bytes = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def close(self) -> None:
        """Drops everything: parser and callbacks refer to each other."""
        self._parser = None
        self.queue.clear()

    def _is_within_message(self) -> bool:
        return self.in_head or (self._arriving is not None and not self._arriving.complete)

    def _head_too_large(self) -> Refusal:
        return refusals.head_too_large(self._limits.max_head_bytes)

    # --- HttpRequestParser ---

    def on_message_begin(self) -> None:
        self._begin_head()
        self.in_head = True

    def on_url(self, part: bytes) -> None:
        self._target += part
        if self._may_be_long:
            self._add_to_head(len(part))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._may_be_long:
            self._add_to_head(len(name) + len(value) + 4)  # ": " and the line's end
        if self.in_head:
            self._headers.append((name.lower(), value))

    def _add_to_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > self._max_head_bytes:
            raise ValueError("head too large")  # stops the parser

    def on_headers_complete(self) -> None:
        parser = cast(HttpRequestParser, self._parser)
        self.in_head = False
        self._arriving = None
        if parser.should_upgrade():
            return
        http11 = parser.get_http_version() == "1.1"
        keep_alive = http11 and parser.should_keep_alive()
        method = parser.get_method()
        head = RequestHead(method, self._target, self._headers, http11, keep_alive, None, False, False, b"")
        named = head.named
        head.content_length = length_of(named)
        head.chunked = b"transfer-encoding" in named
        head.expects_continue = b"expect" in named and named[b"expect"].lower() == b"100-continue"
        head.request_id = _request_id(named.get(b"x-request-id"))
        too_large = (head.content_length or 0) > self._limits.max_body_bytes
        self._arriving = IncomingRequest(head, too_large=too_large)
        self.queue.append(self._arriving)

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        arriving = self._arriving
        if arriving is None or arriving.too_large:
            return
        arriving.size_bytes += len(piece)
        if arriving.size_bytes > self._limits.max_body_bytes:
            arriving.too_large = True
            arriving.pieces.clear()
        else:
            arriving.pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._arriving is not None:
            self._arriving.complete = True


def _request_id(given: bytes | None) -> bytes:
    """The client's id if it is short and printable, else a new one."""
    if given and len(given) <= _MAX_REQUEST_ID_BYTES and given.isascii() and given.decode().isprintable():
        return given
    return b"%032x" % getrandbits(128)
