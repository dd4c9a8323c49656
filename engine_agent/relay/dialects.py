"""The differences between the API dialects for a stream that continues: which texts an engine makes up (ids, times),
and how a stream says that it failed. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from engine_agent.cell_proxy.answer_rewrite import ResponseEvents, answer_rewrite
from engine_agent.cell_proxy.refusal import Refusal

_IDS: Final = re.compile(rb'"(?:id|item_id|call_id)": ?("[^"\\]{1,128}")')
_TIMES: Final = re.compile(rb'"created(?:_at)?": ?[0-9]{1,20}')
_SPACED_END: Final = b"\n\n"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`names`: texts in every event that introduces an id. Text that a model writes cannot match: its quotes are
    escaped. `ends`: beginnings of the event after which nothing follows."""

    path: bytes
    names: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = (b"data: [DONE]",)

    def may_generate(self, event: bytes) -> bool:
        return any(name in event for name in self.names)

    def is_end(self, event: bytes) -> bool:
        return event.startswith(self.ends)

    def generated(self, event: bytes, *, is_first: bool) -> tuple[bytes, ...]:
        """The texts in an event that its engine made up. Times count in the first event; later ones repeat them."""
        ids = tuple(_IDS.findall(event))
        return (*ids, *_TIMES.findall(event)) if is_first else ids

    def failure(self, refusal: Refusal, opening: bytes, events: int, *, at_boundary: bool) -> bytes:
        """The event that ends a stream whose client has `events` events, of which `opening` is the first, and the
        beginning of another one if not `at_boundary`."""
        rewrite = answer_rewrite(self.path, streaming=True)
        rewrite.filter(opening, complete=False)
        if isinstance(rewrite, ResponseEvents):
            rewrite.events = events
        return rewrite.failure(refusal, at_boundary=at_boundary)


_DIALECTS: Final = {
    dialect.path: dialect
    for dialect in (
        Dialect(b"/v1/chat/completions", (b'"tool_calls"',)),
        Dialect(b"/v1/completions"),
        Dialect(
            b"/v1/responses",
            (b'"response.created"', b'"response.output_item.added"'),
            tuple(b"event: response.%b\n" % end for end in (b"completed", b"incomplete", b"failed")),
        ),
        Dialect(
            b"/v1/messages",
            (b'"message_start"', b'"content_block_start"'),
            (b"event: message_stop\n", b"event: error\n"),
        ),
    )
}


def dialect_of(path: bytes) -> Dialect | None:
    """Returns the dialect of a path whose streams can continue, None for other paths."""
    return _DIALECTS.get(path)
