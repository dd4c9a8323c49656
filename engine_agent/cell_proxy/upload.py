"""The body of one request on its way to the engine: what came of it, what it gains, its framing, and whether it can be
sent again. Pure. It goes on whole, because a body that is not read could mean anything."""

from engine_agent.cell_proxy.rewrite import with_members
from engine_agent.cell_proxy.wire import Headers, RequestHead, request_head


class Upload:
    """The bytes of one body. `repeat_limit_bytes`: a longer one is released once it is on its way.

    `members` are put at the end of the JSON object that the body is; set them before the first `opening`.
    """

    __slots__ = (
        *("_head", "_pieces", "_repeat_limit_bytes"),
        *("complete", "headers", "members", "size_bytes"),
    )

    def __init__(self, head: RequestHead, repeat_limit_bytes: int) -> None:
        self._head = head
        self._repeat_limit_bytes = repeat_limit_bytes
        self._pieces: list[bytes] | None = []
        self.members = b""
        self.headers: Headers = []
        """What the engine gets beside the client's."""
        self.size_bytes = 0
        """Of the body as it came, so far."""
        self.complete = False

    @property
    def repeatable(self) -> bool:
        """Whether it is here to be sent again after it was sent."""
        return self.size_bytes <= self._repeat_limit_bytes

    def add(self, data: bytes, *, complete: bool) -> None:
        """Take the next piece; none comes once it was sent."""
        self.complete = complete
        if data and self._pieces is not None:
            self.size_bytes += len(data)
            self._pieces.append(data)

    def add_members(self, members: bytes) -> None:
        """Further ones, as they stand in JSON; none are none."""
        self.members = b",".join(filter(None, (self.members, members)))

    def whole(self) -> bytes:
        """The body as it came.

        Raises:
            ValueError: it was released.
        """
        if self._pieces is None:
            raise ValueError("the body was already released")
        self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]

    def opening(self, host: bytes) -> bytes:
        """Head and body, for a new engine connection.

        Raises:
            ValueError: not `repeatable`, and sent before.
        """
        body = with_members(self.whole(), self.members)
        if not self.repeatable:
            self.forget()
        has_body = self._head.content_length is not None or self._head.chunked
        framing = b"content-length: %d\r\n" % len(body) if has_body else b""
        return request_head(self._head, host=host, framing=framing, own=self.headers) + body

    def forget(self) -> None:
        """Give up the possibility to send it, and the memory with it."""
        self._pieces = None
