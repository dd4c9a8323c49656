"""Counters of the engine: the usage of one request, the comparison of all tokens with the proxy's own count, and the
engine's steps. Changes no count, and sends nothing to an idle engine.

`fetch_usage` asks for the usage of a request whose answer did not state it (`engine_agent.protocol.proxy_messages`). An
engine without a ledger knows nothing of it.

`TokenChecker` compares growths while nothing is in flight: only then have both sides counted the same requests. The
tokens of the proxy's own probes are subtracted. The comparison restarts after a request of unknown usage (a cancelled
one, of an engine without a ledger), and when the engine restarts. It covers the last `COMPARED_S`, so that an old
difference ends. A difference opens an incident.

`WorkReader` reads steps and their tokens next to the busy time of the cell, from which the cost of each kind of token
is derived, the batch and the KV cache, and the accepted guesses of the last hour."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.upstream import CallResponse, EnginePool, call
from engine_agent.cell_proxy.usage_reader import TokenUsage
from engine_agent.protocol.load_messages import CellWork, EngineLoad, SpeculationLoad, TokenCheck
from engine_agent.protocol.proxy_messages import (
    COUNTED_APART_PATH,
    END_LIMIT_S,
    READ_LIMIT_S,
    READ_PATH,
    USAGE_PATH,
    CountedApart,
    ExchangeUsage,
)

_ASK_LIMIT_S = END_LIMIT_S + 2.0
_APART_LIMIT_S = 1.0


async def fetch_usage(pool: EnginePool, exchange: bytes) -> TokenUsage | None:
    """The usage of the request with this name, once it has ended; None: the engine does not know, or is gone."""
    try:
        answer = await call(pool, b"GET", b"%b?exchange=%b" % (USAGE_PATH.encode(), exchange), None, _ASK_LIMIT_S)
        used = msgspec.json.decode(answer.body, type=ExchangeUsage) if answer.status == 200 else None
    except (OSError, msgspec.DecodeError):  # TimeoutError is an OSError
        return None
    return None if used is None else TokenUsage(used.prompt_tokens, used.completion_tokens, used.cached_tokens)


async def prompt_is_read(pool: EnginePool, exchange: bytes) -> bool:
    """Waits until the engine has read the prompts of this request, or it has ended. False: the engine does not report
    that."""
    target = b"%b?exchange=%b" % (READ_PATH.encode(), exchange)
    try:
        while (answer := await call(pool, b"GET", target, None, READ_LIMIT_S + _APART_LIMIT_S)).status == 202:
            continue  # each call has a limit, and so has its request
    except OSError:
        return False
    return answer.status == 200


async def fetch_counted_apart(pool: EnginePool) -> CountedApart:
    """Tokens in the engine's counters that are in no usage. None for an engine without a ledger. Raises OSError if it
    cannot be reached."""
    answer = await call(pool, b"GET", COUNTED_APART_PATH.encode(), None, _APART_LIMIT_S)
    try:
        return msgspec.json.decode(answer.body, type=CountedApart) if answer.status == 200 else CountedApart(0, 0)
    except msgspec.DecodeError:
        return CountedApart(0, 0)


CHECK_INTERVAL_S = 5.0
COMPARED_S = 900.0
"""The age of the comparison: at least this, and at most half as much again."""
_METRICS_LIMIT_S = 5.0
_METRICS_BYTES = 4 * 1024 * 1024
"""vLLM's page has some 100 kB per engine."""
_TOKEN_COUNTER = re.compile(
    rb"^((?:vllm:|sglang:|trtllm_|)(?:prompt|generation)_tokens_total|llamacpp:prompt_tokens_total"
    rb"|llamacpp:prompt_tokens_cached_total|llamacpp:tokens_predicted_total"
    rb"|switchyard_prompt_tokens_total|switchyard_completion_tokens_total)(?:\{[^\n]*\})? ([0-9.eE+]+)\s*$",
    re.MULTILINE,
)
_COMPLETIONS = (b"generation_tokens_total", b"tokens_predicted_total", b"completion_tokens_total")
"""Ends of these names; the others count prompts. llama.cpp counts cached tokens apart, the other engines with the
others. Some versions of TensorRT-LLM have the names without a prefix. Triton's own metrics (`nv_`) have no tokens: the
names with `switchyard_` are those of its model."""


@dataclass(frozen=True, slots=True)
class TokenTotals:
    prompt: int = 0
    completion: int = 0

    def __sub__(self, other: "TokenTotals") -> "TokenTotals":
        return TokenTotals(self.prompt - other.prompt, self.completion - other.completion)


async def _metrics_page(cell: Cell) -> CallResponse:
    """Raises OSError if the engine cannot be reached."""
    path = cell.settings.metrics_path.encode()
    return await call(cell.pool, b"GET", path, None, _METRICS_LIMIT_S, max_bytes=_METRICS_BYTES)


def read_counters(page: bytes) -> TokenTotals | None:
    matches = _TOKEN_COUNTER.findall(page)
    completion = sum(float(value) for name, value in matches if name.endswith(_COMPLETIONS))
    prompt = sum(float(value) for name, value in matches if not name.endswith(_COMPLETIONS))
    return TokenTotals(int(prompt), int(completion)) if matches else None


class TokenChecker:
    """The comparison of one cell; `Cell.token_check` has the last result. `now_s`: seconds since 1970."""

    def __init__(self, cell: Cell, now_s: Callable[[], float] = time.time) -> None:
        self._cell = cell
        self._now_s = now_s
        self._marks: deque[tuple[float, TokenTotals, TokenTotals]] = deque()
        """Possible starts of a comparison, oldest first, with both totals then: the engine's and the proxy's."""
        self._unknown: tuple[int, int] = (0, 0)
        self._seen: object = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Compares if the cell is idle and there are new requests."""
        before = self._moment()
        if before is None or before == self._seen:
            return
        try:
            engine = await self._engine_totals()
        except OSError:  # not there, or too slow: the health health says so
            return
        if engine is not None and self._moment() == before:
            self._seen = before
            self._compare(engine)

    def _moment(self) -> tuple[int, ...] | None:
        """Identifies this idle moment; None while the engine computes something."""
        cell, meter = self._cell, self._cell.meter
        if cell.in_flight or cell.settlements or meter.probes.running:
            return None
        return (meter.requests_total, meter.probes.begun)

    async def _engine_totals(self) -> TokenTotals | None:
        page = await _metrics_page(self._cell)
        totals = read_counters(page.body) if page.status == 200 else None
        apart = await fetch_counted_apart(self._cell.pool)
        return totals and totals - TokenTotals(apart.prompt_tokens, apart.completion_tokens)

    def _compare(self, engine: TokenTotals) -> None:
        meter, now_s = self._cell.meter, self._now_s()
        # An engine counts repeated tokens, with their prompt, as a prompt.
        engine -= TokenTotals(
            meter.probes.prompt_tokens + meter.replayed_total, meter.probes.completion_tokens - meter.recounted_total
        )
        counted = TokenTotals(meter.prompt_tokens_total, meter.tokens_total)
        unknown = (meter.probes.unknown, meter.unreported_total)
        if unknown != self._unknown or self._has_restarted(engine):
            self._unknown = unknown
            self._marks.clear()
        if not self._marks or now_s - self._marks[-1][0] >= COMPARED_S / 2:
            self._marks.append((now_s, engine, counted))
        while len(self._marks) > 1 and now_s - self._marks[1][0] >= COMPARED_S:
            self._marks.popleft()
        since, first_engine, first = self._marks[0]
        grown, ours = engine - first_engine, counted - first
        self._cell.token_check = TokenCheck(
            round(since, 3), grown.prompt, grown.completion, ours.prompt, ours.completion
        )

    def _has_restarted(self, engine: TokenTotals) -> bool:
        if not self._marks:
            return False
        grown = engine - self._marks[-1][1]
        return min(grown.prompt, grown.completion) < 0


READ_INTERVAL_S = 10.0
_STEP_COUNTER = re.compile(
    rb"^(vllm:prompt_tokens_total|vllm:generation_tokens_total|vllm:prefix_cache_hits_total"
    rb"|vllm:iteration_tokens_total_count|vllm:external_prefix_cache_hits_total|vllm:nixl_num_failed_transfers_total"
    rb"|llamacpp:prompt_tokens_total|llamacpp:tokens_predicted_total|llamacpp:prompt_tokens_cached_total"
    rb"|llamacpp:n_decode_total|switchyard_prompt_tokens_total|switchyard_cached_tokens_total"
    rb"|switchyard_completion_tokens_total|switchyard_steps_total)(?:\{[^\n]*\})? ([0-9.eE+]+)\s*$",
    re.MULTILINE,
)
_RUNNING, _WAITING, _KV, _PREEMPTED = "running", "waiting", "kv", "preempted"
_BATCH_FIGURES: dict[bytes, str] = {
    b"vllm:num_requests_running": _RUNNING,
    b"vllm:num_requests_waiting": _WAITING,
    b"vllm:kv_cache_usage_perc": _KV,
    b"vllm:gpu_cache_usage_perc": _KV,
    b"vllm:num_preemptions_total": _PREEMPTED,
    b"sglang:num_running_reqs": _RUNNING,
    b"sglang:num_queue_reqs": _WAITING,
    b"sglang:token_usage": _KV,
    b"llamacpp:requests_processing": _RUNNING,
    b"llamacpp:requests_deferred": _WAITING,
    b"llamacpp:kv_cache_usage_ratio": _KV,
}
"""Of the KV cache, vLLM's second name and llama.cpp's are those of older releases. Shares are from 0 to 1."""
_BATCH_FIGURE = re.compile(rb"^(%b)(?:\{[^\n]*\})? ([0-9.eE+-]+)\s*$" % b"|".join(sorted(_BATCH_FIGURES)), re.MULTILINE)
_SPECULATION_COUNTER = re.compile(
    rb"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{[^\n]*\})? ([0-9.eE+]+)\s*$", re.MULTILINE
)
SPECULATION_S = 3600.0
SPECULATION_SAMPLE_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Since the engine started, summed over its engines. `cached_tokens`: prompt tokens from its cache or from another
    engine. `failed_transfers`: prompts that could not be fetched from another engine, and were read here."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failed_transfers: int = 0


def read_totals(page: bytes) -> EngineTotals | None:
    """The engine's counters of steps and tokens; None if it does not count steps."""
    found: dict[bytes, float] = {}
    for name, value in _STEP_COUNTER.findall(page):
        found[name] = found.get(name, 0.0) + float(value)
    if b"llamacpp:n_decode_total" in found:
        cached = int(found.get(b"llamacpp:prompt_tokens_cached_total", 0))
        return EngineTotals(
            steps=int(found[b"llamacpp:n_decode_total"]),
            prompt_tokens=int(found.get(b"llamacpp:prompt_tokens_total", 0)) + cached,
            cached_tokens=cached,
            completion_tokens=int(found.get(b"llamacpp:tokens_predicted_total", 0)),
        )
    if b"switchyard_steps_total" in found:
        return EngineTotals(
            steps=int(found[b"switchyard_steps_total"]),
            prompt_tokens=int(found.get(b"switchyard_prompt_tokens_total", 0)),
            cached_tokens=int(found.get(b"switchyard_cached_tokens_total", 0)),
            completion_tokens=int(found.get(b"switchyard_completion_tokens_total", 0)),
        )
    if b"vllm:iteration_tokens_total_count" not in found:
        return None
    prompt = int(found.get(b"vllm:prompt_tokens_total", 0))
    hits = found.get(b"vllm:prefix_cache_hits_total", 0) + found.get(b"vllm:external_prefix_cache_hits_total", 0)
    return EngineTotals(
        steps=int(found[b"vllm:iteration_tokens_total_count"]),
        prompt_tokens=prompt,
        cached_tokens=min(prompt, int(hits)),
        completion_tokens=int(found.get(b"vllm:generation_tokens_total", 0)),
        failed_transfers=int(found.get(b"vllm:nixl_num_failed_transfers_total", 0)),
    )


def read_engine_load(page: bytes) -> EngineLoad | None:
    """The engine's batch, summed over its engines; its KV cache is their mean. None if it reports no batch."""
    found: dict[str, list[float]] = {}
    for name, value in _BATCH_FIGURE.findall(page):
        found.setdefault(_BATCH_FIGURES[name], []).append(float(value))
    if _RUNNING not in found:
        return None
    shares = found.get(_KV)
    return EngineLoad(
        running=int(sum(found[_RUNNING])),
        waiting=int(sum(found.get(_WAITING, ()))),
        kv_percent=round(100 * sum(shares) / len(shares), 1) if shares else None,
        preemptions_total=int(sum(found.get(_PREEMPTED, ()))),
    )


def read_speculation(page: bytes) -> tuple[int, int, int] | None:
    found: dict[bytes, int] = {}
    for name, value in _SPECULATION_COUNTER.findall(page):
        found[name] = found.get(name, 0) + int(float(value))
    if b"drafts" not in found:
        return None
    return found[b"drafts"], found.get(b"draft_tokens", 0), found.get(b"accepted_tokens", 0)


class SpeculationWindow:
    """Growth of the engine's speculation counters over the last hour, sampled once a minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[int, int, int]]] = deque()

    def note(self, now: float, counters: tuple[int, int, int]) -> SpeculationLoad | None:
        """Adds a sample; None if there were no drafts. Lower counters mean that the engine restarted."""
        if self._samples and counters[0] < self._samples[-1][1][0]:
            self._samples.clear()
        if not self._samples or now - self._samples[-1][0] >= SPECULATION_SAMPLE_S:
            self._samples.append((now, counters))
        while len(self._samples) > 1 and now - self._samples[1][0] >= SPECULATION_S:
            self._samples.popleft()
        began, first = self._samples[0]
        drafts, guessed, accepted = (ours - theirs for ours, theirs in zip(counters, first, strict=True))
        if drafts <= 0:
            return None
        return SpeculationLoad(round(now - began, 1), drafts, max(0, guessed), max(0, accepted))


class WorkReader:
    """The totals of one cell; `Cell.work` has the last ones."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._first: tuple[float, float, EngineTotals] | None = None
        """When the totals started, with the seconds busy and the engine's counters then."""
        self._last = EngineTotals()
        self._read_at_s = -1.0
        self._speculation = SpeculationWindow()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(READ_INTERVAL_S)
            await self.read()

    async def read(self) -> None:
        """Reads the page, unless the cell was idle since the last time."""
        busy_s = self._cell.busy_s()
        if busy_s == self._read_at_s:
            return
        try:
            page = await _metrics_page(self._cell)
        except OSError:  # not there, or too slow: the health health says so
            return
        if page.status != 200:
            return
        self._cell.engine = read_engine_load(page.body)
        guesses = read_speculation(page.body)
        self._cell.speculation = None if guesses is None else self._speculation.note(time.monotonic(), guesses)
        totals = read_totals(page.body)
        if totals is not None:
            self._read_at_s = busy_s
            self._add_busy_time(self._cell.busy_s(), totals)

    def _add_busy_time(self, busy_s: float, totals: EngineTotals) -> None:
        """Lower counters mean that the engine restarted; the totals then start again."""
        if self._first is None or totals.steps < self._last.steps:
            self._first = (time.time(), busy_s, totals)
        self._last = totals
        since, busy_then_s, first = self._first
        self._cell.handovers.counts.recomputed = max(0, totals.failed_transfers - first.failed_transfers)
        self._cell.work = CellWork(
            round(since, 3),
            round((busy_s - busy_then_s) * 1000),
            totals.steps - first.steps,
            max(0, totals.prompt_tokens - first.prompt_tokens),
            max(0, totals.cached_tokens - first.cached_tokens),
            max(0, totals.completion_tokens - first.completion_tokens),
        )
