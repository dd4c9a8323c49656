"""Keeps a cell's prefix index: asks the engine what happened to its cache, for ever. An engine that does not tell, or
is away, has no index, and ingresses do without."""

import asyncio
from collections.abc import Callable

from engine_agent.cell_proxy.http_call import call
from engine_agent.cell_proxy.prefix_index import PrefixIndex
from engine_agent.cell_proxy.upstream import EnginePool
from engine_agent.protocol.cache_events import EVENTS_PATH, HOLD_S, BadChanges, decode_blocks

_ASK_LIMIT_S = HOLD_S + 4.0
_ANSWER_BYTES = 32 * 1024 * 1024
"""All blocks of the largest cache that is listed, some 9 bytes each, three times over."""
_PAUSE_S = 0.02
"""Between two questions: a busy engine has news in each of its steps."""
_RETRY_S = 1.0
_SILENT_RETRY_S = 30.0
"""Of an engine that has no such page."""


class CacheReader:
    """Reads one engine's cache into an index. `on_change` is called when the index may have changed."""

    def __init__(self, pool: EnginePool, index: PrefixIndex, on_change: Callable[[], None]) -> None:
        self._pool = pool
        self._index = index
        self._on_change = on_change

    async def run(self) -> None:
        while True:
            if pause_s := await self.read():
                await asyncio.sleep(pause_s)

    async def read(self) -> float:
        """Ask once; returns how long to wait before the next question, in seconds."""
        life, number = self._index.known_upto
        target = b"%b?life=%b&after=%d" % (EVENTS_PATH.encode(), life.encode("latin-1"), number)
        try:
            answer = await call(self._pool, b"GET", target, None, _ASK_LIMIT_S, max_bytes=_ANSWER_BYTES)
            if answer.status == 200:
                self._index.apply(decode_blocks(answer.body))
                self._on_change()
                return _PAUSE_S
        except (OSError, BadChanges):
            answer = None
        self._index.lose()
        self._on_change()
        return _SILENT_RETRY_S if answer is not None else _RETRY_S
