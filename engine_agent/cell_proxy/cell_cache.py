"""A cell's prefix cache: its index, the reader of the engine's events, the answers to ingresses, and how well it
predicts the engine's hits. It never delays a request."""

import asyncio
from collections.abc import Callable
from urllib.parse import parse_qs

import msgspec

from engine_agent.cell_proxy.admission import RequestMetadata
from engine_agent.cell_proxy.prefix_index import PrefixIndex, RequestPrefixes
from engine_agent.cell_proxy.upstream import EnginePool, call
from engine_agent.cell_proxy.wire import LocalResponse
from engine_agent.protocol.load_messages import CacheLoad
from engine_agent.protocol.proxy_messages import CACHE_POLL_S, EVENTS_PATH, BadChanges, decode_blocks

GATHER_S = 0.02
"""Delay between a change and the answer to ingresses: a prompt's blocks arrive in several steps."""


class CellCache:
    def __init__(self, pool: EnginePool) -> None:
        self.index = PrefixIndex()
        self.reader = CacheReader(pool, self.index, self._announce)
        self._change: asyncio.Event | None = None
        """The next one, if a reader waits for it."""
        self._asked = self._predicted = self._found = self._other = self._other_found = 0

    # --- of requests ---

    def begin(self, exchange: bytes, prefixes: RequestPrefixes | None) -> None:
        if prefixes is not None:
            self.index.begin(exchange.decode("latin-1"), prefixes)

    def count(self, exchange: bytes, prompt_tokens: int) -> None:
        self.index.count(exchange.decode("latin-1"), prompt_tokens)
        self._announce()

    def settle(self, exchange: bytes, metadata: RequestMetadata, prompt_tokens: int | None, cached_tokens: int) -> None:
        name = exchange.decode("latin-1")
        if prompt_tokens:
            self.index.count(name, prompt_tokens)
            self._compare(metadata, prompt_tokens, cached_tokens)
        self.index.end(name)
        self._announce()

    def _compare(self, metadata: RequestMetadata, prompt_tokens: int, cached_tokens: int) -> None:
        prefixes, matched_bytes = metadata.prefixes, metadata.matched_bytes
        if prefixes is None or matched_bytes is None:
            self._other += prompt_tokens
            self._other_found += cached_tokens
            return
        self._asked += prompt_tokens
        self._predicted += min(prompt_tokens, prompt_tokens * matched_bytes // max(1, prefixes.text_bytes))
        self._found += cached_tokens

    # --- to ingresses ---

    async def wait_for_change(self, query: str) -> None:
        """Waits until there are changes for this reader, or `CACHE_POLL_S`."""
        if not self.index.is_current(*_parse_cursor(query)):
            return
        try:
            async with asyncio.timeout(CACHE_POLL_S):
                while self.index.is_current(*_parse_cursor(query)):
                    self._change = self._change or asyncio.Event()
                    await self._change.wait()
        except TimeoutError:
            return
        await asyncio.sleep(GATHER_S)

    def answer(self, query: str) -> LocalResponse:
        return LocalResponse(
            200, msgspec.msgpack.encode(self.index.after(*_parse_cursor(query))), b"application/msgpack"
        )

    def _announce(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None

    def load(self) -> CacheLoad:
        index = self.index
        return CacheLoad(
            is_known=index.is_known,
            blocks=index.block_count,
            block_tokens=index.block_tokens if index.is_known else 0,
            prefixes=index.prefix_count,
            asked_tokens_total=self._asked,
            predicted_tokens_total=self._predicted,
            found_tokens_total=self._found,
            other_tokens_total=self._other,
            other_found_tokens_total=self._other_found,
        )


def _parse_cursor(query: str) -> tuple[str, int]:
    fields = parse_qs(query)
    after = fields.get("after", ["0"])[0]
    return fields.get("life", [""])[0], int(after) if after.isdecimal() and after.isascii() else 0


# Polls the engine for changes of its cache. An engine that does not report them, or is away, has no index, and
# ingresses do without.

_ASK_LIMIT_S = CACHE_POLL_S + 4.0
_ANSWER_BYTES = 32 * 1024 * 1024
"""All blocks of the largest listed cache, some 9 bytes each, three times over."""
_PAUSE_S = 0.02
"""Between two requests: a busy engine has changes in each of its steps."""
_RETRY_S = 1.0
_SILENT_RETRY_S = 30.0
"""For an engine without this page."""


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
