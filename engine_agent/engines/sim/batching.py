"""The time model of continuous batching: which requests are in a step, how long it takes, and which get a token.

It reads no clock and does no I/O: the caller passes the time, waits until a step ends, and finishes it. Memory is
reserved for a request's whole length at admission, so only batch requests are preempted (vLLM also preempts others,
which matters only with a full cache). Of a prompt that starts in the prefix cache, or that another cell has read, only
the rest is computed. A prompt that was read for another cell is kept until `forget`. `engine_agent.engines.class_order`
has the rules for batch requests."""

import heapq
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from engine_agent.engines.class_order import BATCH_PROMPT_TOKENS, batch_prompt_room, is_batch, urgent_prompt_tokens
from engine_agent.engines.sim.prefix_cache import CacheChange, PrefixCache

_ANY = 2**31


class TooLong(ValueError):
    """A request that can never fit into the KV cache."""


@dataclass(frozen=True)
class ModelParameters:
    """The speed of the simulated cell. The defaults resemble a 70B model on one node with 8 accelerators.

    A step takes `decode_step_ms`, `decode_step_per_seq_ms` for each sequence in it, and the time to prefill at most
    `prefill_chunk_tokens` tokens. The sum varies by a uniform ± `step_jitter` (a fraction), drawn from `seed`. Prefixes
    are found in blocks of `prefix_block_tokens` (vLLM's default; 0 disables the cache). A step reads at most
    `batch_prompt_tokens` of batch prompts (0 treats batch requests like all others)."""

    prefill_tokens_per_s: float = 8000.0
    decode_step_ms: float = 20.0
    decode_step_per_seq_ms: float = 0.25
    kv_capacity_tokens: int = 131_072
    max_num_seqs: int = 64
    prefill_chunk_tokens: int = 2048
    prefix_block_tokens: int = 16
    batch_prompt_tokens: int = BATCH_PROMPT_TOKENS
    step_jitter: float = 0.03
    seed: int = 0


@dataclass(frozen=True)
class Handover:
    """A prompt's part in two cells. `taken_over`: its tokens that another cell has computed and that are here before
    admission. `is_kept`: its memory stays after its end, until `forget`."""

    taken_over: int = 0
    is_kept: bool = False


NO_HANDOVER = Handover()


@dataclass(frozen=True)
class Sequence:
    """A request for the model: lengths in tokens. A lower `priority` goes first. Without output it ends when its prompt
    is read, like an embedding. `blocks` are the hashes of the full blocks of prompt and answer (`block_hashes`)."""

    id: str
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    blocks: tuple[int, ...] = ()
    handover: Handover = NO_HANDOVER

    @property
    def total_tokens(self) -> int:
        """Its size in the KV cache at its end."""
        return self.prompt_tokens + self.output_tokens


class TokenGiven(msgspec.Struct, frozen=True):
    """A token of a sequence; `index` counts from 0. -1: the prompt is read, and there is no token."""

    sequence: str
    index: int
    is_last: bool


@dataclass(frozen=True)
class Step:
    """One pass of the model. Times are the caller's, in seconds. `admitted` left the queue for this step for the first
    time, mapped to their prompt tokens in the prefix cache. `prefilled`: prompt tokens that it reads, by sequence. The
    sequences in `yielding` get a token when it ends."""

    starts_at_s: float
    ends_at_s: float
    admitted: Mapping[str, int]
    prefilled: Mapping[str, int]
    yielding: tuple[str, ...]


@dataclass
class _Running:
    """`resumed`: tokens of its answer before it was preempted, which are read again with its prompt."""

    sequence: Sequence
    prefilled: int = 0
    generated: int = 0
    resumed: int = 0
    held: list[int] = field(default_factory=list)

    @property
    def prompt_left(self) -> int:
        return self.sequence.prompt_tokens + self.resumed - self.prefilled

    @property
    def computed(self) -> int:
        return self.prefilled + self.generated - self.resumed


@dataclass
class BatchingModel:
    """The queue and the batch of one cell. `begin_step` and `finish_step` alternate. `notes_cache`: changes of the
    prefix cache are kept for `take_cache_changes`."""

    parameters: ModelParameters
    notes_cache: bool = False
    _waiting: dict[str, Sequence] = field(default_factory=dict)
    _order: list[tuple[int, int, str]] = field(default_factory=list)
    _running: dict[str, _Running] = field(default_factory=dict)
    _kept: dict[str, _Running] = field(default_factory=dict)
    """Finished sequences, kept for another cell."""
    _preempted: dict[str, int] = field(default_factory=dict)
    """Waiting sequences that were in the batch -> tokens of their answers so far."""
    _private_tokens: int = 0
    _arrivals: int = 0
    _step: Step | None = None
    preemptions: int = 0
    """Since the start."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.parameters.seed)
        self._cache = PrefixCache(self.parameters.prefix_block_tokens)
        self._cache_changes: list[CacheChange] = []

    def take_cache_changes(self) -> tuple[CacheChange, ...]:
        """Returns the changes of the prefix cache since the last call. A sequence is named while it is in the batch,
        and in the call after it left."""
        changes, self._cache_changes = tuple(self._cache_changes), []
        return changes

    def found_tokens(self, blocks: Iterable[int]) -> int:
        """Returns how many tokens of a prompt with these blocks are cached."""
        return len(self._cache.found(blocks, _ANY)) * self.parameters.prefix_block_tokens

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache of sequences in the batch and kept ones; shared blocks count once."""
        block_tokens = self.parameters.prefix_block_tokens
        return self._cache.held_tokens + sum(
            running.computed - len(running.held) * block_tokens
            for running in (*self._running.values(), *self._kept.values())
        )

    @property
    def kv_reserved_tokens(self) -> int:
        """Tokens that sequences in the batch will occupy at their end, and those of kept ones."""
        return self._cache.held_tokens + self._private_tokens

    @property
    def kv_kept_tokens(self) -> int:
        """Tokens in the KV cache that no sequence uses, kept for later prompts."""
        return self._cache.free_tokens

    def submit(self, sequence: Sequence) -> None:
        """Appends a sequence to the queue of its priority. Raises TooLong if it is longer than the whole KV cache.
        Raises ValueError if its id is in use, or it has no prompt."""
        if sequence.prompt_tokens < 1 or sequence.output_tokens < 0:
            raise ValueError(f"sequence {sequence.id} needs at least 1 prompt token")
        if sequence.id in self._waiting or sequence.id in self._running or sequence.id in self._kept:
            raise ValueError(f"sequence {sequence.id} is already here")
        if sequence.total_tokens > self.parameters.kv_capacity_tokens:
            raise TooLong(
                f"{sequence.prompt_tokens} prompt and {sequence.output_tokens} output tokens exceed the KV cache of "
                f"{self.parameters.kv_capacity_tokens} tokens"
            )
        self._waiting[sequence.id] = sequence
        heapq.heappush(self._order, (sequence.priority, self._arrivals, sequence.id))
        self._arrivals += 1

    def cancel(self, sequence_id: str) -> bool:
        """Removes a sequence and frees its memory. Returns False if it is not here."""
        self._preempted.pop(sequence_id, None)
        if self._waiting.pop(sequence_id, None) is not None:
            # Its entry leaves `_order` as well: the same id may be submitted again.
            self._order = [entry for entry in self._order if entry[2] != sequence_id]
            heapq.heapify(self._order)
            return True
        return self._leave_batch(sequence_id)

    def forget(self, sequence_id: str) -> bool:
        """Frees the memory of a kept sequence. Returns False if it is not kept."""
        kept = self._kept.pop(sequence_id, None)
        if kept is None:
            return False
        self._free(kept)
        return True

    def begin_step(self, now_s: float, slow_factor: float = 1.0) -> Step | None:
        """Admits what fits and plans the step that starts now, `slow_factor` times as long as normal. Returns None if
        there is nothing to do until the next `submit`. Raises RuntimeError if the previous step is not finished."""
        if self._step is not None:
            raise RuntimeError("the previous step is not finished")
        admitted = self._admit()
        if self._preempt_for_urgent():
            admitted |= self._admit()
        if not self._running:
            return None
        prefilled = self._prefill_chunk()
        rests = self._batch_rests(prefilled)
        yielding = tuple(
            name
            for name, running in self._running.items()
            if running.prompt_left == prefilled.get(name, 0) and not (rests and is_batch(running.sequence.priority))
        )
        duration_s = self._duration_s(len(set(prefilled) | set(yielding)), sum(prefilled.values())) * slow_factor
        self._step = Step(now_s, now_s + duration_s, admitted, prefilled, yielding)
        return self._step

    def finish_step(self) -> tuple[TokenGiven, ...]:
        """Returns the tokens of the step that ended; sequences that were cancelled meanwhile get none. Raises
        RuntimeError if no step was begun."""
        if self._step is None:
            raise RuntimeError("no step was begun")
        step, self._step = self._step, None
        for name, tokens in step.prefilled.items():
            if name in self._running:
                self._running[name].prefilled += tokens
                self._keep_full_blocks(self._running[name])
        return tuple(self._emit_token(name) for name in step.yielding if name in self._running)

    def _admit(self) -> dict[str, int]:
        """Strictly in order: no request overtakes a long one at the head that waits for room, so none starves."""
        admitted: dict[str, int] = {}
        block_tokens = self.parameters.prefix_block_tokens
        while self._order and len(self._running) < self.parameters.max_num_seqs:
            sequence = self._waiting[self._order[0][2]]
            if is_batch(sequence.priority) and self._batch_room() == 0:
                break
            # The last token of a prompt is always computed: it makes the first one of the answer.
            most = (sequence.prompt_tokens - 1) // block_tokens if block_tokens else 0
            cached = self._cache.found(sequence.blocks, most)
            shared_tokens = sum(map(self._cache.is_held, cached)) * block_tokens
            needed = self.kv_reserved_tokens + sequence.total_tokens - shared_tokens
            if needed > self.parameters.kv_capacity_tokens:
                break
            heapq.heappop(self._order)
            del self._waiting[sequence.id]
            known = self._preempted.pop(sequence.id, None)
            read = max(len(cached) * block_tokens, min(sequence.handover.taken_over, sequence.prompt_tokens - 1))
            running = _Running(sequence, read, generated=known or 0, resumed=known or 0)
            self._running[sequence.id] = running
            self._private_tokens += sequence.total_tokens
            self._hold(running, cached)
            gone = self._cache.evict_beyond(self.parameters.kv_capacity_tokens - self.kv_reserved_tokens)
            if gone and self.notes_cache:
                self._cache_changes.append(CacheChange(gone))
            self._keep_full_blocks(running)
            if known is None:
                admitted[sequence.id] = running.prefilled
        return admitted

    def _preempt_for_urgent(self) -> bool:
        """Preempts the latest batch sequence if an urgent one waits for room: one per step."""
        if not self._order or not self.parameters.batch_prompt_tokens or is_batch(self._order[0][0]):
            return False
        last = next((name for name in reversed(self._running) if is_batch(self._running[name].sequence.priority)), None)
        if last is None:
            return False
        running = self._running[last]
        self._leave_batch(last)
        self.preemptions += 1
        self._preempted[last] = running.generated
        self._waiting[last] = replace(running.sequence, handover=NO_HANDOVER)  # its tokens are freed as well
        heapq.heappush(self._order, (running.sequence.priority, -self._arrivals, last))
        self._arrivals += 1
        return True

    def _hold(self, running: _Running, blocks: Iterable[int]) -> None:
        before, fresh = (running.held[-1] if running.held else 0), list[int]()
        parent = before
        for block in blocks:
            if self._cache.has(block):
                self._note_stored(running, parent, fresh)
                fresh = []
            else:
                parent = parent if fresh else before
                fresh.append(block)
            self._cache.hold(block)
            running.held.append(block)
            self._private_tokens -= self.parameters.prefix_block_tokens
            before = block
        self._note_stored(running, parent, fresh)

    def _note_stored(self, running: _Running, parent: int, blocks: list[int]) -> None:
        if blocks and self.notes_cache:
            self._cache_changes.append(CacheChange(tuple(blocks), running.sequence.id, parent))

    def _keep_full_blocks(self, running: _Running) -> None:
        if self.parameters.prefix_block_tokens:
            full = running.computed // self.parameters.prefix_block_tokens
            self._hold(running, running.sequence.blocks[len(running.held) : full])

    def _batch_room(self) -> int | None:
        limit = self.parameters.batch_prompt_tokens or None
        unread = ((each.sequence.priority, each.prompt_left) for each in self._running.values() if each.prompt_left)
        return batch_prompt_room(limit, unread)

    def _prefill_chunk(self) -> dict[str, int]:
        budget = self.parameters.prefill_chunk_tokens
        unread = [(name, running) for name, running in self._running.items() if running.prompt_left > 0]
        if limit := self.parameters.batch_prompt_tokens:
            urgent = [(name, running) for name, running in unread if not is_batch(running.sequence.priority)]
            beside_batch = any(is_batch(each.sequence.priority) for each in self._running.values())
            room = urgent_prompt_tokens(budget, beside_batch=beside_batch) if urgent else min(budget, limit)
            budget, unread = room, urgent or unread
        chunk: dict[str, int] = {}
        for name, running in unread:
            if budget == 0:
                break
            chunk[name] = min(budget, running.prompt_left)
            budget -= chunk[name]
        return chunk

    def _batch_rests(self, prefilled: Iterable[str]) -> bool:
        is_on = self.parameters.batch_prompt_tokens > 0
        return is_on and any(not is_batch(self._running[name].sequence.priority) for name in prefilled)

    def _duration_s(self, sequences: int, prefill_tokens: int) -> float:
        parameters = self.parameters
        decode_s = (parameters.decode_step_ms + parameters.decode_step_per_seq_ms * sequences) / 1000
        jitter = 1 + self._random.uniform(-parameters.step_jitter, parameters.step_jitter)
        return (decode_s + prefill_tokens / parameters.prefill_tokens_per_s) * jitter

    def _emit_token(self, name: str) -> TokenGiven:
        running = self._running[name]
        if running.sequence.output_tokens == 0:
            self._leave_batch(name)
            return TokenGiven(name, -1, is_last=True)
        running.generated += 1
        self._keep_full_blocks(running)
        is_last = running.generated == running.sequence.output_tokens
        if is_last and running.sequence.handover.is_kept:
            self._kept[name] = self._running.pop(name)
        elif is_last:
            self._leave_batch(name)
        return TokenGiven(name, running.generated - 1, is_last)

    def _leave_batch(self, sequence_id: str) -> bool:
        running = self._running.pop(sequence_id, None)
        if running is None:
            return False
        self._free(running)
        return True

    def _free(self, running: _Running) -> None:
        block_tokens = self.parameters.prefix_block_tokens
        self._private_tokens -= running.sequence.total_tokens - len(running.held) * block_tokens
        self._cache.release(running.held)
