"""Takes the usage event out of a stream whose client did not ask for one. Pure. It passes whole events on at once,
holds back only the beginning of one, and changes none that it lets pass."""

_END = b"\n\n"
_FOREIGN_END = b"\r\n\r\n"
_MAX_HELD_BYTES = 1024 * 1024
"""No event of an engine is as long; what has no end by then passes as it is."""


class UsageHider:
    """The events of one stream."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def pass_on(self, piece: bytes, *, complete: bool) -> bytes:
        """Take the next bytes of the stream; returns those that the client gets now."""
        text = self._held + piece if self._held else piece
        cut = len(text) if complete else self._end_of_whole_events(text)
        self._held = text[cut:]
        text = text[:cut]
        if b'"usage"' not in text:
            return text
        *whole, rest = text.split(_END)
        kept = b"".join(event + _END for event in whole if not is_usage_event(event))
        return kept if is_usage_event(rest) else kept + rest

    def _end_of_whole_events(self, text: bytes) -> int:
        """Up to where events are complete. An engine that ends its events otherwise is passed on as it is."""
        if text.endswith(_END) or _FOREIGN_END in text:
            return len(text)
        cut = text.rfind(_END) + len(_END) if _END in text else 0
        return len(text) if len(text) - cut > _MAX_HELD_BYTES else cut


def is_usage_event(event: bytes) -> bool:
    """The event that carries the token counts and no choice. A model's own words cannot look so: their quotes are
    escaped."""
    return b'"choices":[]' in event.replace(b" ", b"") and b'"usage"' in event
