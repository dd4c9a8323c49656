"""Reads how many steps the engine made and how many tokens were in them, beside the time for which its cell was busy:
what a token of each kind costs is told from these totals. It changes no count and asks an idle engine nothing."""

import asyncio
import re
import time
from dataclasses import dataclass

from engine_agent.protocol.messages import CellWork
from engine_agent.proxy.cell import Cell
from engine_agent.proxy.http_call import call

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


class WorkReader:
    """The totals of one cell; `Cell.work` has the last ones."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._first: tuple[float, float, EngineTotals] | None = None
        """When the totals began, and what was there then: seconds busy, the engine's counters."""
        self._last = EngineTotals()
        self._read_at_s = -1.0

    async def run(self) -> None:
        """Read for ever."""
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
        totals = read_totals(page.body) if page.status == 200 else None
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
