"""The changes of an engine's prefix cache, kept for its cell proxy: which blocks are there, and what changed last. A
part of the engine's HTTP on loopback, the same for all engines that tell.

A reader that is behind by more than what is kept gets all blocks as they are. Memory is bounded by `MAX_BLOCKS`: a
larger cache is not listed from then on, and its cell is found as one without a list.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from random import getrandbits

import msgspec

from engine_agent.protocol.proxy_messages import (
    CACHE_POLL_S,
    MAX_BLOCKS,
    BlockChanges,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
)

KEPT_BLOCKS = 100_000
"""Named in the events that are kept: 1.6 million tokens, minutes of a busy engine. A reader asks each second."""


class CacheLog:
    """One cache. Used from one thread, that of the engine's HTTP."""

    def __init__(self, block_tokens: int, *, kept_blocks: int = KEPT_BLOCKS, most_blocks: int = MAX_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._kept_blocks, self._most_blocks = kept_blocks, most_blocks
        self._life = f"{getrandbits(64):016x}"
        self._parents: dict[int, int] = {}
        """Of each block that is there, the one before it."""
        self._events: deque[BlockEvent] = deque()
        self._named = 0
        self._upto = 0
        self._changed = asyncio.Event()
        self.overflowed = False

    def add(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            self._apply(event)
            self._events.append(event)
            self._named += _size(event)
            self._upto += 1
        while self._events and self._named > self._kept_blocks:
            self._named -= _size(self._events.popleft())
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget(self) -> None:
        """Some events were lost for good: what is listed from now on is what was stored since. It is less than what is
        there, and never more."""
        self.add((CacheCleared(),))

    def _apply(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored(parent, blocks, _):
                for block in blocks:
                    self._parents[block] = parent
                    parent = block
                if len(self._parents) > self._most_blocks:
                    self.overflowed = True
                    self._parents.clear()
            case BlocksRemoved(blocks):
                for block in blocks:
                    self._parents.pop(block, None)
            case CacheCleared():
                self._parents.clear()

    def after(self, life: str, number: int) -> BlockChanges:
        """What a reader has to learn that knows all up to `number` of `life`."""
        oldest = self._upto - len(self._events)
        if life == self._life and oldest <= number <= self._upto:
            news = tuple(self._events)[number - oldest :]
            return BlockChanges(self._life, self._upto, False, self.block_tokens, news)
        # While all that ever happened is kept, it says more: for which requests blocks were stored.
        whole = self._events if oldest == 0 else self._whole()
        return BlockChanges(self._life, self._upto, True, self.block_tokens, tuple(whole))

    def _whole(self) -> Iterator[BlocksStored]:
        """All blocks, those behind each other together. Their parents may be gone."""
        run: list[int] = []
        first = 0
        for block, parent in self._parents.items():
            if run and parent != run[-1]:
                yield BlocksStored(first, tuple(run))
                run = []
            if not run:
                first = parent
            run.append(block)
        if run:
            yield BlocksStored(first, tuple(run))

    async def answer(self, life: str, number: int, hold_s: float = CACHE_POLL_S) -> tuple[int, bytes]:
        """Status and body for a reader that knows all up to `number` of `life`: once there is news, or after `hold_s`.
        404: this cache is not listed."""
        if self.overflowed:
            return 404, b"{}"
        changed = self._changed
        if life == self._life and number == self._upto:
            try:
                async with asyncio.timeout(hold_s):
                    await changed.wait()
            except TimeoutError:
                pass
        return 200, msgspec.msgpack.encode(self.after(life, number))

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self._parents)


def _size(event: BlockEvent) -> int:
    return 1 + (0 if isinstance(event, CacheCleared) else len(event.blocks))
