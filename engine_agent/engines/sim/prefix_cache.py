"""The KV cache as blocks: which leading blocks of a prompt are cached, which sequences use them, which are evicted
first. A block is identified by a hash of its tokens and of all tokens before them, as in vLLM
(`vllm/v1/core/kv_cache_utils.py`). Blocks in use are never evicted. Other blocks stay until their room is needed: the
least recently used are evicted first, and of one prompt its end before its beginning."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice


def block_hashes(tokens: Sequence[str], block_tokens: int, adapter: str = "") -> tuple[int, ...]:
    """Returns a hash for each full block of `block_tokens` tokens; equal hashes mean an equal beginning and the same
    `adapter`. With 0 there are no blocks. The hashes are valid within one process only, like a cache."""
    return tuple(_chained_hashes(tokens, block_tokens, adapter)) if block_tokens > 0 else ()


def _chained_hashes(tokens: Sequence[str], block_tokens: int, adapter: str) -> Iterator[int]:
    parent = hash(adapter) if adapter else 0
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = hash((parent, *islice(tokens, start, start + block_tokens)))
        yield parent


@dataclass(frozen=True)
class CacheChange:
    """A change of the prefix cache: `blocks` were stored for `sequence`, the first one behind `parent` (0: it is the
    first of all); without a sequence they were removed."""

    blocks: tuple[int, ...]
    sequence: str = ""
    parent: int = 0


@dataclass
class PrefixCache:
    block_tokens: int
    _holders: dict[int, int] = field(default_factory=dict)
    _free: "OrderedDict[int, None]" = field(default_factory=OrderedDict)

    @property
    def held_tokens(self) -> int:
        """Tokens of blocks that sequences in the batch use."""
        return len(self._holders) * self.block_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens of unused blocks, which later prompts may find."""
        return len(self._free) * self.block_tokens

    def found(self, blocks: Iterable[int], at_most: int) -> tuple[int, ...]:
        """Returns the leading blocks that are cached, `at_most` of them. Changes nothing."""
        present: list[int] = []
        for block in islice(blocks, at_most):
            if not self.has(block):
                break
            present.append(block)
        return tuple(present)

    def has(self, block: int) -> bool:
        return block in self._holders or block in self._free

    def is_held(self, block: int) -> bool:
        """Whether a sequence uses it, so that another one can share it without more room."""
        return block in self._holders

    def hold(self, block: int) -> None:
        """Marks a cached or newly computed block as used by one more sequence."""
        self._free.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Ends the use of a finished sequence's blocks, given in order."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                self._free[block] = None

    def evict_beyond(self, room_tokens: int) -> tuple[int, ...]:
        """Evicts unused blocks until the others fit into this room; returns the evicted ones."""
        gone: list[int] = []
        while self._free and self.free_tokens > room_tokens:
            gone.append(self._free.popitem(last=False)[0])
        return tuple(gone)
