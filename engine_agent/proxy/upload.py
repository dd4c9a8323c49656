"""The body of one request on its way to the engine: framing, what was sent, and whether it can be sent again. Pure; it
keeps no more than it may need to repeat."""

from engine_agent.proxy.rewrite import MemberAppender
from engine_agent.proxy.wire import LAST_CHUNK, Headers, RequestHead, chunk, request_head


class Upload:
    """Bytes that wait for an engine connection, and afterwards those kept for a repeat on a fresh one.

    `members` are put at the end of the JSON object that the body is; set them before the first `opening`.
    """

    __slots__ = (
        *("_appender", "_chunked", "_head", "_keep_limit_bytes", "_kept", "_opened"),
        *("complete", "headers", "kept_bytes", "members", "size_bytes"),
    )

    def __init__(self, head: RequestHead, keep_limit_bytes: int) -> None:
        self._head = head
        self._keep_limit_bytes = keep_limit_bytes
        self._kept: list[bytes] | None = []
        self._appender = MemberAppender(b"")
        self._chunked = False
        self._opened = False
        self.members = b""
        self.headers: Headers = []
        """What the engine gets beside the client's."""
        self.kept_bytes = 0
        self.size_bytes = 0
        """Of the body as it came, so far."""
        self.complete = False

    @property
    def repeatable(self) -> bool:
        """True while everything sent so far is still here."""
        return self._kept is not None

    def add(self, data: bytes, *, complete: bool) -> bytes:
        """Take the next piece; returns what goes to the engine now (nothing before `opening`)."""
        self.complete = complete
        self.size_bytes += len(data)
        if data and self._kept is not None:
            self._kept.append(data)
            self.kept_bytes += len(data)
        if not self._opened:
            return b""
        if self.kept_bytes > self._keep_limit_bytes:
            self.forget()
        return self._framed(self._appender.add(data, complete=complete))

    def add_members(self, members: bytes) -> None:
        """Further ones, as they stand in JSON; none are none."""
        self.members = b",".join(filter(None, (self.members, members)))

    def opening(self, host: bytes) -> bytes:
        """Head and body so far, for a new engine connection.

        Raises:
            ValueError: not `repeatable`.
        """
        if self._kept is None:
            raise ValueError("the body was already forgotten")
        self._appender = MemberAppender(self.members)
        body = self._appender.add(b"".join(self._kept), complete=self.complete)
        framing = self._choose_framing(len(body))
        self._opened = True
        if self.kept_bytes > self._keep_limit_bytes:
            self.forget()
        return request_head(self._head, host=host, framing=framing, own=self.headers) + self._framed(body)

    def whole(self) -> bytes | None:
        """The body as it came, or None while it is not complete or no longer kept."""
        return b"".join(self._kept) if self.complete and self._kept is not None else None

    def rewind(self) -> None:
        """The connection failed: keep everything again until the next `opening`."""
        self._opened = False

    def forget(self) -> None:
        """Give up the possibility to repeat, and the memory with it."""
        self._kept = None
        self.kept_bytes = 0

    def _choose_framing(self, body_bytes: int) -> bytes:
        head = self._head
        if head.content_length is None and not head.chunked:
            return b""
        length = body_bytes if self.complete else head.content_length
        if length is not None and not self.complete:
            length += self._appender.added_bytes
        self._chunked = length is None
        return b"transfer-encoding: chunked\r\n" if length is None else b"content-length: %d\r\n" % length

    def _framed(self, data: bytes) -> bytes:
        if not self._chunked:
            return data
        return chunk(data) + (LAST_CHUNK if self.complete else b"")
