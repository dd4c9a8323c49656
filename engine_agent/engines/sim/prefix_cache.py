"""The KV cache as blocks: which leading blocks of a prompt are there already, who holds them, which are evicted first.

A block is known by a hash of its tokens and of all before them, as in vLLM (`vllm/v1/core/kv_cache_utils.py`). Blocks
that a sequence in the batch uses are held and never evicted; the others stay until their room is needed, the least
recently used first and of one prompt its end before its beginning. It holds no keys and values and knows no time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice


def block_hashes(tokens: Sequence[str], block_tokens: int, adapter: str = "") -> tuple[int, ...]:
    """A hash for each full block of `block_tokens` tokens; equal hashes mean an equal beginning, and one `adapter`, by
    which keys and values were computed. 0: no blocks at all.

    The hashes hold within one process only, as a cache does.
    """
    return tuple(_chained_hashes(tokens, block_tokens, adapter)) if block_tokens > 0 else ()


def _chained_hashes(tokens: Sequence[str], block_tokens: int, adapter: str) -> Iterator[int]:
    parent = hash(adapter) if adapter else 0
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = hash((parent, *islice(tokens, start, start + block_tokens)))
        yield parent


@dataclass(frozen=True)
class CacheChange:
    """What happened to the prefix cache: `blocks` were stored for `sequence`, the first one behind `parent` (0: it is
    the first of all); or, without a sequence, they were removed."""

    blocks: tuple[int, ...]
    sequence: str = ""
    parent: int = 0


@dataclass
class PrefixCache:
    """Blocks of `block_tokens` tokens each, within a capacity in tokens that sequences' private tokens share."""

    block_tokens: int
    _holders: dict[int, int] = field(default_factory=dict)
    _free: "OrderedDict[int, None]" = field(default_factory=OrderedDict)

    @property
    def held_tokens(self) -> int:
        """Tokens of blocks that sequences in the batch use."""
        return len(self._holders) * self.block_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens of blocks that are unused now and that the next prompt may find."""
        return len(self._free) * self.block_tokens

    def found(self, blocks: Iterable[int], at_most: int) -> tuple[int, ...]:
        """The leading blocks that are there, `at_most` of them. Looking changes nothing."""
        present: list[int] = []
        for block in islice(blocks, at_most):
            if not self.has(block):
                break
            present.append(block)
        return tuple(present)

    def has(self, block: int) -> bool:
        """Whether it is there, used or not."""
        return block in self._holders or block in self._free

    def is_held(self, block: int) -> bool:
        """Whether a sequence uses it, so that another one may without taking room."""
        return block in self._holders

    def hold(self, block: int) -> None:
        """A sequence uses this block from now on, whether it was there or has just been computed."""
        self._free.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence is over; `blocks` are those that it held, in their order."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                self._free[block] = None

    def evict_beyond(self, room_tokens: int) -> tuple[int, ...]:
        """Forget unused blocks, until the rest of them needs at most this room; returns which."""
        gone: list[int] = []
        while self._free and self.free_tokens > room_tokens:
            gone.append(self._free.popitem(last=False)[0])
        return tuple(gone)
