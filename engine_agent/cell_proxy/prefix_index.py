"""The index of request beginnings in the cache of a cell's engine. Pure.

The engine reports which blocks of tokens it has, and for which request it stored them. The ingress names the beginnings
of a request's text by hashes (`engine_agent/ingress/prompt_prefixes.lua`), and the engine reports how many tokens its
prompt has. So a computed request shows which blocks each of its beginnings consists of, without a second tokenization.
The end of a block in the text is estimated by proportion. If two requests begin alike and then differ, their last
common block counts, so the second request of a kind corrects the estimate.

A prefix is listed while the last of its blocks is cached: an engine evicts the end of a prompt before its beginning. So
all shorter beginnings of a listed text are listed, and readers may use binary search. Blocks, requests in flight, known
prefixes and changes for ingresses are all bounded."""

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import getrandbits

from engine_agent.protocol.proxy_messages import (
    MAX_BLOCKS,
    MAX_PREFIXES,
    MAX_REQUEST_PREFIXES,
    PREFIX_DIGITS,
    BlockChanges,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    PrefixChanges,
    packed,
)

PREFIXES_HEADER = b"x-switchyard-cache-prefixes"
"""`BYTES:END,END,…:HASHES`."""
MATCHED_HEADER = b"x-switchyard-cache-matched"
"""How many bytes of that text the ingress found in this cell's index."""
_PREFIXES = re.compile(rb"([0-9]{1,9}):([0-9,]{1,800}):([0-9a-f]{12,960})")


@dataclass(frozen=True, slots=True)
class RequestPrefixes:
    """Hashes of the beginnings of a request's text. `ends`: their lengths in bytes, ascending. `prefixes`: their
    hashes, which include everything that separates the blocks of equal text: adapter, tenant, salt. `text_bytes`:
    length of the whole."""

    prefixes: tuple[int, ...]
    ends: tuple[int, ...]
    text_bytes: int


def read_prefixes(value: bytes) -> RequestPrefixes | None:
    found = _PREFIXES.fullmatch(value)
    if found is None or len(found[3]) % PREFIX_DIGITS:
        return None
    ends = tuple(int(end) for end in found[2].split(b",") if end)
    hashes = tuple(int(found[3][at : at + PREFIX_DIGITS], 16) for at in range(0, len(found[3]), PREFIX_DIGITS))
    text_bytes = int(found[1])
    if len(ends) != len(hashes) or len(ends) > MAX_REQUEST_PREFIXES or list(ends) != sorted(set(ends)):
        return None
    return RequestPrefixes(hashes, ends, text_bytes) if ends[-1] <= text_bytes else None


MAX_UNDER_WAY, MAX_ENDED = 4096, 64
"""Requests whose blocks are not all known yet: more than a cell can run. And requests that have ended, because an
engine can report their blocks after the answer."""
MAX_KEPT_CHANGES = 65_536
MAX_CHAIN_BLOCKS = 131_072
"""Of one prompt: 2 million tokens. A longer chain is not a prompt, or is circular."""


@dataclass(slots=True)
class _UnderWay:
    request: RequestPrefixes
    blocks: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    is_bound: bool = False
    """Its whole prompt is computed and known."""


class PrefixIndex:
    def __init__(self, *, most_prefixes: int = MAX_PREFIXES, most_blocks: int = MAX_BLOCKS) -> None:
        self._most_prefixes, self._most_blocks = most_prefixes, most_blocks
        self._life = _new_life()
        self._engine_life = ""
        self._engine_upto = 0
        self.block_tokens = 0
        self.is_known = False
        """The engine reports its blocks."""
        self._parents: dict[int, int] = {}
        self._under_way: OrderedDict[str, _UnderWay] = OrderedDict()
        self._ended: OrderedDict[str, _UnderWay] = OrderedDict()
        self._last_blocks: OrderedDict[int, int] = OrderedDict()
        """Prefix -> the last of its blocks, cached or not."""
        self._prefixes_of: dict[int, set[int]] = {}
        self._listed: set[int] = set()
        self._changes: deque[tuple[int, bool]] = deque(maxlen=MAX_KEPT_CHANGES)
        self._upto = 0

    @property
    def known_upto(self) -> tuple[str, int]:
        """The last applied change of the engine: what to request next."""
        return self._engine_life, self._engine_upto

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self._parents)

    @property
    def block_count(self) -> int:
        return len(self._parents)

    @property
    def prefix_count(self) -> int:
        return len(self._listed)

    # --- from the engine ---

    def apply(self, changes: BlockChanges) -> None:
        if changes.is_whole:
            self._clear()
        self._know(True)
        self.block_tokens = changes.block_tokens
        for event in changes.events:
            match event:
                case BlocksStored(parent, blocks, exchange):
                    self._store(parent, blocks, exchange)
                case BlocksRemoved(blocks):
                    self._remove(blocks)
                case CacheCleared():
                    self._clear()
        self._engine_life, self._engine_upto = changes.life, changes.upto

    def lose(self) -> None:
        """The engine was restarted, or no longer reports its blocks."""
        self._clear()
        self._under_way.clear()
        self._ended.clear()
        self._know(False)
        self._engine_life, self._engine_upto = "", 0

    def _know(self, is_known: bool) -> None:
        """Readers of the list start again when it becomes known or unknown."""
        if self.is_known is not is_known:
            self.is_known, self._life = is_known, _new_life()

    def _store(self, parent: int, blocks: tuple[int, ...], exchange: str) -> None:
        known = self._request(exchange) if exchange else None
        if known is not None:
            if not known.blocks or known.blocks[-1] != parent:
                known.blocks = self._chain(parent)
            if known.blocks or not parent:
                known.blocks.extend(blocks)
        for block in blocks:
            is_new = block not in self._parents
            self._parents[block] = parent
            if is_new:
                self._list_all(self._prefixes_of.get(block, ()))
            parent = block
        if known is not None:
            self._bind(known)
        if len(self._parents) > self._most_blocks:
            self._clear()

    def _chain(self, last: int) -> list[int]:
        """The blocks up to this one; empty if its beginning is not known."""
        chain: list[int] = []
        while last and last in self._parents and len(chain) < MAX_CHAIN_BLOCKS:
            chain.append(last)
            last = self._parents[last]
        if last:
            return []
        chain.reverse()
        return chain

    def _remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._parents.pop(block, None) is not None:
                for prefix in self._prefixes_of.get(block, ()):
                    self._unlist(prefix)

    def _clear(self) -> None:
        self._parents.clear()
        for prefix in tuple(self._listed):
            self._unlist(prefix)

    # --- from requests ---

    def begin(self, exchange: str, request: RequestPrefixes) -> None:
        self._under_way[exchange] = _UnderWay(request)
        for prefix in reversed(request.prefixes):  # its end is evicted before its beginning
            if prefix in self._last_blocks:
                self._last_blocks.move_to_end(prefix)
        while len(self._under_way) > MAX_UNDER_WAY:
            self._under_way.popitem(last=False)

    def count(self, exchange: str, prompt_tokens: int) -> None:
        """The engine reported the length of its prompt."""
        if (known := self._request(exchange)) is not None and known.prompt_tokens != prompt_tokens:
            known.prompt_tokens, known.is_bound = prompt_tokens, False
            self._bind(known)

    def end(self, exchange: str) -> None:
        known = self._under_way.pop(exchange, None)
        if known is not None and not known.is_bound:
            self._ended[exchange] = known
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _request(self, exchange: str) -> _UnderWay | None:
        return self._under_way.get(exchange) or self._ended.get(exchange)

    def _bind(self, known: _UnderWay) -> None:
        """Determines the blocks of its prefixes, as far as they are computed."""
        request = known.request
        if known.is_bound or not (known.prompt_tokens and self.block_tokens and request.text_bytes):
            return
        known.is_bound = (len(known.blocks) + 1) * self.block_tokens > known.prompt_tokens
        places = {block: at for at, block in enumerate(known.blocks)}
        # The longest first, so that it is evicted first. Text shorter than a block is cached with that block.
        for prefix, end in zip(reversed(request.prefixes), reversed(request.ends), strict=True):
            count = max(1, end * known.prompt_tokens // request.text_bytes // self.block_tokens)
            if count <= len(known.blocks):
                last = self._shared(self._last_blocks.get(prefix, 0), places) or known.blocks[count - 1]
                self._bind_to(prefix, last)

    def _shared(self, block: int, places: dict[int, int]) -> int:
        """The last block of another request's beginning that is also one of these; 0 if there is none."""
        steps = 0
        while block and block not in places and steps < MAX_CHAIN_BLOCKS:
            block, steps = self._parents.get(block, 0), steps + 1
        return block

    def _bind_to(self, prefix: int, block: int) -> None:
        before = self._last_blocks.get(prefix)
        self._last_blocks[prefix] = block
        self._last_blocks.move_to_end(prefix)
        if before != block:
            if before is not None:
                self._unbind(prefix, before)
            self._prefixes_of.setdefault(block, set()).add(prefix)
        if block in self._parents:
            self._list_all((prefix,))
        else:
            self._unlist(prefix)
        while len(self._last_blocks) > self._most_prefixes:
            oldest, of_block = self._last_blocks.popitem(last=False)
            self._unbind(oldest, of_block)
            self._unlist(oldest)

    def _unbind(self, prefix: int, block: int) -> None:
        prefixes = self._prefixes_of.get(block, set())
        prefixes.discard(prefix)
        if not prefixes:
            self._prefixes_of.pop(block, None)

    # --- to ingresses ---

    def _list_all(self, prefixes: Iterable[int]) -> None:
        for prefix in prefixes:
            if prefix not in self._listed:
                self._listed.add(prefix)
                self._change(prefix, there=True)

    def _unlist(self, prefix: int) -> None:
        if prefix in self._listed:
            self._listed.discard(prefix)
            self._change(prefix, there=False)

    def _change(self, prefix: int, *, there: bool) -> None:
        self._changes.append((prefix, there))
        self._upto += 1

    def is_current(self, life: str, number: int) -> bool:
        """Whether a reader with all changes up to `number` of `life` is up to date."""
        return life == self._life and number == self._upto

    def after(self, life: str, number: int) -> PrefixChanges:
        oldest = self._upto - len(self._changes)
        is_whole = life != self._life or not oldest <= number <= self._upto
        if is_whole:
            return PrefixChanges(self._life, self._upto, True, self.is_known, packed(self._listed), b"")
        last = dict(self._since(number - oldest))
        added = packed([prefix for prefix, there in last.items() if there])
        removed = packed([prefix for prefix, there in last.items() if not there])
        return PrefixChanges(self._life, self._upto, False, self.is_known, added, removed)

    def _since(self, start: int) -> Iterator[tuple[int, bool]]:
        """From the end, so that a reader who is nearly up to date does not pay for a long list."""
        return reversed([self._changes[-1 - at] for at in range(len(self._changes) - start)])


def _new_life() -> str:
    return f"{getrandbits(64):016x}"
