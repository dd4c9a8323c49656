"""Runs the time model against the clock: takes requests, waits until each step ends, hands out the tokens.

It alone decides whether the engine takes a request (`refusal`), and why not. It knows nothing of HTTP, of text or of
other members; the process tells it when the cell is whole, which faults are in force and when it is over.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_agent.engines.cache_log import CacheLog
from engine_agent.engines.sim.batching import (
    NO_HANDOVER,
    BatchingModel,
    Handover,
    ModelParameters,
    Sequence,
    Step,
    TokenGiven,
)
from engine_agent.engines.sim.faults import Effects
from engine_agent.engines.sim.leases import Leases
from engine_agent.engines.sim.meters import Gauges, Meters
from engine_agent.engines.sim.planning.handover import HandoverParameters
from engine_agent.engines.usage_ledger import SequenceTokens, current_exchange, note
from engine_agent.protocol.proxy_messages import BlocksRemoved, BlocksStored

CATCH_UP_S = 0.05
"""A step that was noticed late by less than this does not delay the next one; the timer of a busy host is coarse."""


class NotServing(Exception):
    """The engine takes no request now, or gave one up; the text says why."""


@dataclass(frozen=True)
class Aborted:
    """The engine gave the request up before its last token."""

    reason: str


Events = asyncio.Queue[TokenGiven | Aborted]


@dataclass
class PromptCount:
    """Whether a prompt is counted; the generations of several answers to it share one. `name` is that of the first."""

    is_counted: bool = False
    name: str = ""


@dataclass
class Generation:
    """One sequence in the engine, as the one who waits for it sees it. Several may share one queue of `events`.

    `cached_tokens` are those of its prompt that the prefix cache had, `generated` those that it has given so far.
    `counts_prompt`: its prompt is counted with it. `exchange` names the request that it is for.
    """

    sequence: Sequence
    finish_reason: str
    arrived_at_s: float
    events: Events
    prompt: PromptCount = field(default_factory=PromptCount)
    cached_tokens: int = 0
    generated: int = 0
    last_token_at_s: float | None = None
    counts_prompt: bool = False
    exchange: str = ""


class NotedGeneration:
    """A generation as the usage ledger sees it."""

    def __init__(self, engine: "Engine", generation: Generation) -> None:
        self._engine = engine
        self._generation = generation

    def tokens(self) -> SequenceTokens:
        generation = self._generation
        return SequenceTokens(
            prompt=generation.prompt.name,
            prompt_tokens=generation.sequence.prompt_tokens,
            is_read=generation.counts_prompt,
            cached_tokens=generation.cached_tokens,
            completion_tokens=generation.generated,
        )

    @property
    def is_running(self) -> bool:
        return self._engine.has(self._generation)

    async def stop(self) -> None:
        self._engine.cancel(self._generation)


class Engine:
    """One cell's computation. `run` is its only loop."""

    def __init__(
        self,
        parameters: ModelParameters,
        meters: Meters,
        clock: Callable[[], float] = time.monotonic,
        on_decode: Callable[[int, float], None] = lambda _sequences, _compute_ms: None,
        on_refusal: Callable[[], None] = lambda: None,
        handover: HandoverParameters | None = None,
    ) -> None:
        """`on_decode` is called for every step without prefill: its sequences, and a healthy member's time;
        `on_refusal` when `refusal` may be another."""
        self.handover = handover or HandoverParameters()
        self.leases = Leases(self.handover, self._forget, clock)
        self._on_refusal = on_refusal
        self.meters = meters
        self._on_decode = on_decode
        self.effects = Effects()
        self.parameters = parameters
        self._model = BatchingModel(parameters, notes_cache=True)
        self.cache = CacheLog(parameters.prefix_block_tokens)
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        self._ids = itertools.count()
        self._changed = asyncio.Event()
        self._refusal = "starting"
        self._over = False

    @property
    def refusal(self) -> str:
        """Why no request is taken now; empty when they are."""
        return self._refusal

    @property
    def in_flight(self) -> int:
        """Requests in the queue and in the batch."""
        return len(self._generations)

    def gauges(self) -> Gauges:
        usage = self._model.kv_tokens / self.parameters.kv_capacity_tokens
        return Gauges(self._model.running, self._model.waiting, usage, self._model.kept, self.leases.expired)

    def open(self) -> None:
        if not self._over:
            self._refuse("")

    def postpone(self, reason: str) -> None:
        """Not yet: what is still missing before requests are taken."""
        if not self._over:
            self._refuse(reason)

    def close(self, reason: str) -> None:
        """Take no request any more; those in flight go on."""
        if not self._over:
            self._over = True
            self._refuse(reason)

    def fail(self, reason: str) -> None:
        """Give up everything in flight and take nothing any more, for `reason`."""
        self._over = True
        self._refuse(reason)
        for generation in self._generations.values():
            self._model.cancel(generation.sequence.id)
            self.meters.finished["abort"] += 1
            generation.events.put_nowait(Aborted(reason))
        self._generations.clear()
        self.leases.clear()
        self._announce_change()

    def set_effects(self, effects: Effects) -> None:
        """Put the members' faults in force, from the next step on (a hang holds the present one)."""
        self.effects = effects
        self._announce_change()

    def submit(
        self,
        prompt_tokens: int,
        output_tokens: int,
        finish_reason: str,
        priority: int = 0,
        blocks: tuple[int, ...] = (),
        events: Events | None = None,
        prompt: PromptCount | None = None,
        handover: Handover = NO_HANDOVER,
    ) -> Generation:
        """Queue a sequence; `finish_reason` is what to count it under once it is complete (`stop`, `length`), `blocks`
        the hashes of its full blocks (`block_hashes`). `events` and `prompt` are its own, or those
        of the generations that it shares them with. One that is kept is among `leases` once it is complete.

        Raises:
            NotServing: see `refusal`.
            TooLong: it could never fit into the KV cache.
        """
        if self._refusal:
            raise NotServing(self._refusal)
        name = f"seq-{next(self._ids)}"
        sequence = Sequence(name, prompt_tokens, output_tokens, priority, blocks, handover)
        self._model.submit(sequence)
        generation = Generation(sequence, finish_reason, self._clock(), events or Events(), prompt or PromptCount())
        generation.prompt.name = generation.prompt.name or sequence.id
        generation.exchange = current_exchange()
        self._generations[sequence.id] = generation
        note(NotedGeneration(self, generation))
        self._announce_change()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Forget a request whose client has left; harmless when it is already over."""
        if self._generations.pop(generation.sequence.id, None) is not None:
            self._model.cancel(generation.sequence.id)
            self.meters.finished["abort"] += 1
            self._announce_change()

    def has(self, generation: Generation) -> bool:
        """Whether it is in the queue or in the batch."""
        return generation.sequence.id in self._generations

    async def idle(self) -> None:
        """Return once nothing is in flight."""
        while self._generations:
            await self._wait_for_change()

    async def run(self) -> None:
        """Step for ever; ends only by being cancelled."""
        now_s = self._clock()
        while True:
            slow_factor = self.effects.slow_factor
            step = self._model.begin_step(now_s, slow_factor)
            if step is None:
                await self._wait_for_change()
                now_s = self._clock()
                continue
            self._count_admitted(step)
            self._tell_cache()
            await asyncio.sleep(max(0.0, step.ends_at_s - self._clock()))
            while self.effects.hang:
                await self._wait_for_change()
            now_s = self._clock()
            if not step.prefilled:
                self._on_decode(len(step.yielding), (step.ends_at_s - step.starts_at_s) * 1000 / slow_factor)
            self.meters.iteration_tokens.observe(sum(step.prefilled.values()) + len(step.yielding))
            tokens = self._model.finish_step()
            self._tell_cache()
            for token in tokens:
                self._deliver(token, now_s)
            if now_s - step.ends_at_s < CATCH_UP_S:
                now_s = step.ends_at_s

    def _forget(self, sequence_id: str) -> None:
        self._model.forget(sequence_id)
        self._announce_change()

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._on_refusal()

    async def _wait_for_change(self) -> None:
        await self._changed.wait()

    def _announce_change(self) -> None:
        # A fresh event for every round: `run` and `idle` wait side by side and neither may eat the other's signal.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _tell_cache(self) -> None:
        """As vLLM tells it: what was stored, for which request, and what was removed."""
        changes = self._model.take_cache_changes()
        if not changes:
            return
        of = self._generations
        self.cache.add(
            BlocksStored(each.parent, each.blocks, of[each.sequence].exchange if each.sequence in of else "")
            if each.sequence
            else BlocksRemoved(each.blocks)
            for each in changes
        )

    def _count_admitted(self, step: Step) -> None:
        for name, found_tokens in step.admitted.items():
            generation = self._generations[name]
            generation.cached_tokens = found_tokens
            if generation.sequence.handover.taken_over:
                self.meters.external_hits += found_tokens
            else:
                self.meters.prefix_hits += found_tokens
            self.meters.prefix_queries += generation.sequence.prompt_tokens
            self.meters.queue_time_s.observe(max(0.0, step.starts_at_s - generation.arrived_at_s))

    def _deliver(self, token: TokenGiven, now_s: float) -> None:
        generation = self._generations[token.sequence]
        if generation.last_token_at_s is None:
            generation.counts_prompt = not generation.prompt.is_counted
            self.meters.prompt_tokens += generation.sequence.prompt_tokens * generation.counts_prompt
            generation.prompt.is_counted = True
            self.meters.time_to_first_token_s.observe(now_s - generation.arrived_at_s)
        else:
            self.meters.inter_token_latency_s.observe(now_s - generation.last_token_at_s)
        generation.generated = token.index + 1
        self.meters.generation_tokens += token.index >= 0
        generation.last_token_at_s = now_s
        generation.events.put_nowait(token)
        if token.is_last:
            if generation.sequence.handover.is_kept:
                self.leases.keep(token.sequence, generation.sequence.prompt_tokens)
            self.meters.finished[generation.finish_reason] += 1
            self.meters.latency_s.observe(now_s - generation.arrived_at_s)
            del self._generations[token.sequence]
            self._announce_change()
