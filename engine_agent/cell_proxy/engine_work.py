"""Reads how many steps the engine made and how many tokens were in them, beside the time for which its cell was busy:
what a token of each kind costs is told from these totals; and how many guessed tokens were right in the last hour. It
changes no count and asks an idle engine nothing."""

import asyncio
import re
import time
from collections import deque
from dataclasses import dataclass

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.http_call import call
from engine_agent.protocol.messages import CellWork, SpeculationLoad

READ_INTERVAL_S = 10.0
_METRICS_LIMIT_S = 5.0
_METRICS_BYTES = 4 * 1024 * 1024
"""vLLM's page has some 100 kB for one engine."""
_COUNTER = re.compile(
    rb"^vllm:(prompt_tokens_total|generation_tokens_total|prefix_cache_hits_total|iteration_tokens_total_count"
    rb"|external_prefix_cache_hits_total|nixl_num_failed_transfers_total)"
    rb"(?:\{[^\n]*\})? ([0-9.eE+]+)\s*$",
    re.MULTILINE,
)
_GUESSES = re.compile(
    rb"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{[^\n]*\})? ([0-9.eE+]+)\s*$", re.MULTILINE
)
GUESSES_S = 3600.0
GUESSES_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Since the engine started, over all its engines. `cached_tokens`: of prompts, found or had from another engine;
    `failed_transfers`: what was not had from one, and read here."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    failed_transfers: int = 0


def read_totals(page: bytes) -> EngineTotals | None:
    """The engine's counters of steps and of what was in them; None: it counts no steps."""
    found: dict[bytes, float] = {}
    for name, value in _COUNTER.findall(page):
        found[name] = found.get(name, 0.0) + float(value)
    if b"iteration_tokens_total_count" not in found:
        return None
    prompt = int(found.get(b"prompt_tokens_total", 0))
    cached = found.get(b"prefix_cache_hits_total", 0) + found.get(b"external_prefix_cache_hits_total", 0)
    return EngineTotals(
        steps=int(found[b"iteration_tokens_total_count"]),
        prompt_tokens=prompt,
        cached_tokens=min(prompt, int(cached)),
        completion_tokens=int(found.get(b"generation_tokens_total", 0)),
        failed_transfers=int(found.get(b"nixl_num_failed_transfers_total", 0)),
    )


def read_guesses(page: bytes) -> tuple[int, int, int] | None:
    """The engine's counters of drafts, of guessed and of accepted tokens; None: it guesses nothing."""
    found: dict[bytes, int] = {}
    for name, value in _GUESSES.findall(page):
        found[name] = found.get(name, 0) + int(float(value))
    if b"drafts" not in found:
        return None
    return found[b"drafts"], found.get(b"draft_tokens", 0), found.get(b"accepted_tokens", 0)


class GuessWindow:
    """How the engine's counters of guesses grew over the last hour, from looks that are a minute apart."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, tuple[int, int, int]]] = deque()

    def note(self, now: float, counters: tuple[int, int, int]) -> SpeculationLoad | None:
        """Take a look in; None where nothing was guessed. An engine that counts less than before counts anew."""
        if self._looks and counters[0] < self._looks[-1][1][0]:
            self._looks.clear()
        if not self._looks or now - self._looks[-1][0] >= GUESSES_EVERY_S:
            self._looks.append((now, counters))
        while len(self._looks) > 1 and now - self._looks[1][0] >= GUESSES_S:
            self._looks.popleft()
        began, first = self._looks[0]
        drafts, guessed, accepted = (ours - theirs for ours, theirs in zip(counters, first, strict=True))
        if drafts <= 0:
            return None
        return SpeculationLoad(round(now - began, 1), drafts, max(0, guessed), max(0, accepted))


class WorkReader:
    """The totals of one cell; `Cell.work` has the last ones."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._first: tuple[float, float, EngineTotals] | None = None
        """When the totals began, and what was there then: seconds busy, the engine's counters."""
        self._last = EngineTotals()
        self._read_at_s = -1.0
        self._guesses = GuessWindow()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(READ_INTERVAL_S)
            await self.read()

    async def read(self) -> None:
        """Read now, unless the cell has done nothing since the last time."""
        busy_s = self._cell.busy_s()
        if busy_s == self._read_at_s:
            return
        try:
            page = await call(self._cell.pool, b"GET", b"/metrics", None, _METRICS_LIMIT_S, max_bytes=_METRICS_BYTES)
        except OSError:  # not there, or too slow: the health judge says so
            return
        if page.status != 200:
            return
        guesses = read_guesses(page.body)
        self._cell.speculation = None if guesses is None else self._guesses.note(time.monotonic(), guesses)
        totals = read_totals(page.body)
        if totals is not None:
            self._read_at_s = busy_s
            self._note(self._cell.busy_s(), totals)

    def _note(self, busy_s: float, totals: EngineTotals) -> None:
        """An engine that counts less than before counts anew, and so do the totals."""
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
