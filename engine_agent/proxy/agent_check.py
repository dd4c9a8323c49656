"""The agent-check port: one line per connection tells HAProxy whether this cell takes requests, then the connection
closes. It never says `ready`, which would cancel what an operator set."""

import asyncio
from collections.abc import Callable
from typing import cast

from engine_agent.protocol.states import Phase

_MAX_REASON_CHARS = 100
"""HAProxy keeps the reason in its log and statistics; its line buffer is far longer."""


def agent_check_line(*, phase: Phase, healthy: bool, reason: str) -> bytes:
    """`up 100%`, `drain` or `down #reason`. Death wins over drain: nothing is left to finish on a dead engine."""
    if not healthy:
        return f"down #{_one_line(reason)}\n".encode()
    return b"up 100%\n" if phase is Phase.SERVE else b"drain\n"


def _one_line(reason: str) -> str:
    """Printable ASCII on one line, without the characters that separate agent-check words."""
    plain = "".join(char if char.isascii() and char.isprintable() and char not in ",;" else " " for char in reason)
    return " ".join(plain.split())[:_MAX_REASON_CHARS] or "unknown"


class AgentCheck(asyncio.Protocol):
    """One connection: says the line and closes."""

    def __init__(self, line: Callable[[], bytes]) -> None:
        self._line = line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        stream.write(self._line())
        stream.close()
