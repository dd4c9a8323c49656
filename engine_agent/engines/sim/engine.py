"""Runs the time model against the clock: takes requests, waits until each step ends, delivers tokens, and counts for
`/metrics` under vLLM's names. It alone decides whether the engine takes a request (`refusal`). It knows nothing of
HTTP, text or other members: the process reports when the cell is complete, which faults are in force, and when it
stops."""

import asyncio
import itertools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from engine_agent.engines.sim.kv_transfer import Leases
from engine_agent.engines.sim.planning.generation_request import HandoverParameters
from engine_agent.engines.usage_ledger import CacheLog, SequenceTokens, current_exchange, note
from engine_agent.protocol.proxy_messages import BlocksRemoved, BlocksStored

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
"""vLLM 0.32, `vllm/v1/metrics/loggers.py` (without its last buckets, beyond 160 s)."""
ITL_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)

ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of observations by inclusive upper bound, as in Prometheus."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yields the samples in the text format, cumulative."""
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:.9g}"
        yield f"{name}_count{{{labels}}} {total}"


@dataclass
class Meters:
    """Counts since the process started."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_hits: int = 0
    """Prompt tokens that another engine had read."""
    failed_transfers: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_BUCKETS))
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    latency_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))


@dataclass(frozen=True)
class Gauges:
    """The state of the batch at a scrape. `kept`: prompts that wait for another engine; `expired`: prompts that no
    engine fetched in time, and `preemptions`, since the start."""

    running: int
    waiting: int
    kv_cache_usage: float
    kept: int = 0
    expired: int = 0
    preemptions: int = 0


def render(meters: Meters, gauges: Gauges, model_name: str) -> str:
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'engine="0",model_name="{escaped}"'
    lines: list[str] = []
    for name, help_text, value in (
        ("num_requests_running", "Number of requests in model execution batches.", gauges.running),
        ("num_requests_waiting", "Number of requests waiting to be processed.", gauges.waiting),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", gauges.kv_cache_usage),
    ):
        lines += [*_head(name, "gauge", help_text), f"vllm:{name}{{{labels}}} {value:.6g}"]
    for name, help_text, total in (
        ("prompt_tokens", "Number of prefill tokens processed.", meters.prompt_tokens),
        ("generation_tokens", "Number of generation tokens processed.", meters.generation_tokens),
        ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", meters.prefix_queries),
        ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", meters.prefix_hits),
        ("external_prefix_cache_hits", "Tokens that came from another engine.", meters.external_hits),
        ("nixl_num_failed_transfers", "Number of failed transfers.", meters.failed_transfers),
        ("nixl_num_kv_expired_reqs", "Number of requests whose blocks were not fetched.", gauges.expired),
        ("num_preemptions", "Cumulative number of preemption from the engine.", gauges.preemptions),
    ):
        lines += [*_head(f"{name}_total", "counter", help_text), f"vllm:{name}_total{{{labels}}} {total}"]
    kept = "sim:kv_kept_requests"
    lines += [
        f"# HELP {kept} Prompts kept for other engines.",
        f"# TYPE {kept} gauge",
        f"{kept}{{{labels}}} {gauges.kept}",
    ]
    lines += _head("request_success_total", "counter", "Count of successfully processed requests.")
    for reason in ("stop", "length", "abort"):
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {meters.finished[reason]}')
    for name, help_text, histogram in (
        ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", meters.iteration_tokens),
        ("time_to_first_token_seconds", "Time to first token in seconds.", meters.time_to_first_token_s),
        ("inter_token_latency_seconds", "Inter-token latency in seconds.", meters.inter_token_latency_s),
        ("request_queue_time_seconds", "Time spent in the WAITING phase.", meters.queue_time_s),
        ("e2e_request_latency_seconds", "End to end request latency in seconds.", meters.latency_s),
    ):
        lines += [*_head(name, "histogram", help_text), *histogram.lines(f"vllm:{name}", labels)]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP vllm:{name} {help_text}", f"# TYPE vllm:{name} {kind}"]


CATCH_UP_S = 0.05
"""A step that is noticed late by less than this does not delay the next one; timers of a busy host are coarse."""


class NotServing(Exception):
    """The engine takes no request now, or aborted one; the text states why."""


@dataclass(frozen=True)
class Aborted:
    """The engine aborted the request before its last token."""

    reason: str


Events = asyncio.Queue[TokenGiven | Aborted]


@dataclass
class PromptCount:
    """Whether a prompt is counted; the answers to one prompt share it. `name` is that of the first."""

    is_counted: bool = False
    name: str = ""


@dataclass
class Generation:
    """One sequence for its caller. Several may share one queue of `events`. `cached_tokens`: prompt tokens found in the
    prefix cache; `generated`: tokens so far. `counts_prompt`: its prompt is counted with it. `exchange` names its
    request. Unless `tells_each_token`, only its last token is an event."""

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
    tells_each_token: bool = True


class NotedGeneration:
    """A generation for the usage ledger."""

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
    """The computation of one cell. `run` is its only loop."""

    def __init__(
        self,
        parameters: ModelParameters,
        meters: Meters,
        clock: Callable[[], float] = time.monotonic,
        on_decode: Callable[[int, float], None] = lambda _sequences, _compute_ms: None,
        on_refusal: Callable[[], None] = lambda: None,
        handover: HandoverParameters | None = None,
    ) -> None:
        """`on_decode` is called for every step without prefill, with its sequences and a healthy member's time;
        `on_refusal` when `refusal` may have changed."""
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
        """Why no request is taken now; empty if requests are taken."""
        return self._refusal

    @property
    def in_flight(self) -> int:
        return len(self._generations)

    def gauges(self) -> Gauges:
        usage = self._model.kv_tokens / self.parameters.kv_capacity_tokens
        model = self._model
        return Gauges(model.running, model.waiting, usage, model.kept, self.leases.expired, model.preemptions)

    def open(self) -> None:
        if not self._over:
            self._refuse("")

    def postpone(self, reason: str) -> None:
        """Sets what is missing before requests are taken."""
        if not self._over:
            self._refuse(reason)

    def close(self, reason: str) -> None:
        """Takes no more requests; those in flight continue."""
        if not self._over:
            self._over = True
            self._refuse(reason)

    def fail(self, reason: str) -> None:
        """Aborts everything in flight and takes no more requests."""
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
        """Applies the members' faults from the next step on (a hang also stops the current one)."""
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
        """Queues a sequence. `finish_reason` is counted at its end (`stop`, `length`); `blocks` are the hashes of its
        full blocks (`block_hashes`). `events` and `prompt` may be shared with other generations. A kept sequence is
        among `leases` after its end. Raises NotServing (see `refusal`). Raises TooLong if it can never fit into the KV
        cache."""
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
        """Removes a request whose client disconnected; does nothing if it is over."""
        if self._generations.pop(generation.sequence.id, None) is not None:
            self._model.cancel(generation.sequence.id)
            self.meters.finished["abort"] += 1
            self._announce_change()

    def has(self, generation: Generation) -> bool:
        return generation.sequence.id in self._generations

    async def idle(self) -> None:
        while self._generations:
            await self._wait_for_change()

    async def run(self) -> None:
        now_s = self._clock()
        while True:
            slow_factor = self.effects.slow_factor
            step = self._model.begin_step(now_s, slow_factor)
            if step is None:
                await self._wait_for_change()
                now_s = self._clock()
                continue
            self._count_admitted(step)
            self._record_cache_changes()
            await asyncio.sleep(max(0.0, step.ends_at_s - self._clock()))
            while self.effects.hang:
                await self._wait_for_change()
            now_s = self._clock()
            if not step.prefilled:
                self._on_decode(len(step.yielding), (step.ends_at_s - step.starts_at_s) * 1000 / slow_factor)
            self.meters.iteration_tokens.observe(sum(step.prefilled.values()) + len(step.yielding))
            tokens = self._model.finish_step()
            self._record_cache_changes()
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
        # A new event for each change: `run` and `idle` both wait, and neither may consume the other's signal.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _record_cache_changes(self) -> None:
        """Records as vLLM does what was stored, for which request, and what was removed."""
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
        if token.is_last or generation.tells_each_token:
            generation.events.put_nowait(token)
        if token.is_last:
            if generation.sequence.handover.is_kept:
                self.leases.keep(token.sequence, generation.sequence.prompt_tokens)
            self.meters.finished[generation.finish_reason] += 1
            self.meters.latency_s.observe(now_s - generation.arrived_at_s)
            del self._generations[token.sequence]
            self._announce_change()
