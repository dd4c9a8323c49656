"""Counts the marks of a stream that can continue at another cell, and what of its usage this cell counts. Pure."""

import re

from msgspec.structs import replace

from engine_agent.cell_proxy.meter import Usage

_MARK = re.compile(rb"^: (?:tokens ([0-9,]+)|prompt ([0-9]{1,9}) [0-9a-f]+(?: [0-9]{1,9})?)$", re.MULTILINE)
_END = b"\n\n"
_MOST_EVENT_BYTES = 256 * 1024


class MarkCount:
    """`prompt`: the tokens of the prompt, None before its mark. `tokens`: those of whole events, including those of
    other cells."""

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.tokens = 0
        self._rest = b""

    def add(self, piece: bytes) -> None:
        text = self._rest + piece if self._rest else piece
        cut = text.rfind(_END) + len(_END) if _END in text else 0
        self._rest = text[cut:]
        if len(self._rest) > _MOST_EVENT_BYTES:
            self._rest = b""
        for ids, prompt in _MARK.findall(text, 0, cut):
            if ids:
                self.tokens += ids.count(b",") + 1
            else:
                self.prompt = int(prompt)

    def usage(self) -> Usage:
        return Usage(self.prompt or 0, self.tokens)


def fresh(usage: Usage, counted: int | None) -> Usage:
    """The part of a usage that no other cell has counted. `counted`: tokens that others have, with the prompt."""
    if counted is None:
        return usage
    return replace(usage, prompt=0, completion=max(0, usage.completion - counted), cached=0)
