"""Questions about a state that are answered when it changes: between processes of one node, which ask each other for
ever how they are. Who asks names the state that it knows of, and gets no answer for a moment while that is so.

A question costs the same whether it brings news or not, and it nearly never does. Whoever does not know of this answers
at once, and is asked as often as before. What a state is called is for its owner to say; the empty one is never held.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Callable
from urllib.parse import parse_qs

HOLD_S = 0.6
OVERDUE_S = 0.6
"""How late the answer to a held question may be. So whoever stops answering is noticed within 1.2 s: the same as when a
question every 0.2 s may take a second, which is how what is not known to be well is asked."""


def state_name(*parts: object) -> str:
    """A name for a state of these parts."""
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def held_query(known: str) -> str:
    """What to append to the address of a question, if nothing but `known` has been heard yet: empty to be answered at
    once."""
    return f"?unless={known}&for_ms={HOLD_S * 1000:.0f}" if known else ""


def limit_s(known: str, at_once_s: float) -> float:
    """How long to wait for the answer; `at_once_s` where it is not held."""
    return HOLD_S + OVERDUE_S if known else at_once_s


def wish_of(query: str) -> tuple[str, float]:
    """The state that who asks knows of, and for how many seconds the answer may be held. Empty: it is not to be."""
    fields = parse_qs(query)
    known, for_ms = (fields.get(name, [""])[0] for name in ("unless", "for_ms"))
    return known, min(int(for_ms) / 1000, HOLD_S) if for_ms.isdecimal() and for_ms.isascii() else 0.0


class StateWatch:
    """A state of this process and those who wait for it to change. `name` names it now."""

    def __init__(self, name: Callable[[], str]) -> None:
        self.name = name
        self._waiting: set[asyncio.Event] = set()

    def changed(self) -> None:
        for each in self._waiting:
            each.set()

    async def hold(self, query: str) -> float:
        """Return once a question of this query may be answered; how many seconds that was held."""
        known, for_s = wish_of(query)
        if not known or known != self.name():
            return 0.0
        clock, change = asyncio.get_running_loop().time, asyncio.Event()
        began_s = clock()
        self._waiting.add(change)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(for_s):
                    while known == self.name():
                        change.clear()
                        await change.wait()
        finally:
            self._waiting.discard(change)
        return clock() - began_s
