"""Compares, at moments when the engine is idle, the growth of its own counters with what this proxy counted. It changes
no count: what differs is for people, by an incident.

An instant at which nothing is in flight is the only one at which both have counted the same requests. A busy cell is
checked when it has such an instant. What the proxy's own probes used is taken off the engine's growth. The comparison
begins anew after a probe or request of which no engine said what it used (a cancelled one, with an engine that keeps no
ledger), and when the engine counts from 0 again. It covers the last `COMPARED_S`, so one difference does not last as
long as the cell.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.engine_usage import fetch_counted_apart
from engine_agent.cell_proxy.http_call import call
from engine_agent.protocol.messages import TokenCheck

CHECK_INTERVAL_S = 5.0
COMPARED_S = 900.0
"""At least, once the comparison is as old; at most half as much again."""
_METRICS_LIMIT_S = 5.0
_METRICS_BYTES = 4 * 1024 * 1024
"""vLLM's page has some 100 kB for one engine."""
_COUNTER = re.compile(rb"^vllm:(prompt|generation)_tokens_total(?:\{[^\n]*\})? ([0-9.eE+]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Tokens of prompts and of completions."""

    prompt: int = 0
    completion: int = 0

    def __sub__(self, other: "TokenTotals") -> "TokenTotals":
        return TokenTotals(self.prompt - other.prompt, self.completion - other.completion)


def read_counters(page: bytes) -> TokenTotals | None:
    """The engine's counters of tokens, over all its engines; None: it has none."""
    found = {b"prompt": 0.0, b"generation": 0.0}
    matches = _COUNTER.findall(page)
    for name, value in matches:
        found[name] += float(value)
    return TokenTotals(int(found[b"prompt"]), int(found[b"generation"])) if matches else None


class TokenChecker:
    """The comparison of one cell; `Cell.token_check` has its last result. `now_s`: seconds since 1970."""

    def __init__(self, cell: Cell, now_s: Callable[[], float] = time.time) -> None:
        self._cell = cell
        self._now_s = now_s
        self._marks: deque[tuple[float, TokenTotals, TokenTotals]] = deque()
        """Moments that a comparison may begin at, oldest first, and both totals then: the engine's and ours."""
        self._unknown: tuple[int, int] = (0, 0)
        self._seen: object = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Compare now, if that is possible and there is something new."""
        before = self._moment()
        if before is None or before == self._seen:
            return
        try:
            engine = await self._engine_totals()
        except OSError:  # not there, or too slow: the health judge says so
            return
        if engine is not None and self._moment() == before:
            self._seen = before
            self._compare(engine)

    def _moment(self) -> tuple[int, ...] | None:
        """What tells this idle moment from others; None while the engine computes something."""
        cell, meter = self._cell, self._cell.meter
        if cell.in_flight or cell.settlements or meter.probes.running:
            return None
        return (meter.requests_total, meter.probes.begun)

    async def _engine_totals(self) -> TokenTotals | None:
        pool = self._cell.pool
        page = await call(pool, b"GET", b"/metrics", None, _METRICS_LIMIT_S, max_bytes=_METRICS_BYTES)
        totals = read_counters(page.body) if page.status == 200 else None
        apart = await fetch_counted_apart(pool)
        return totals and totals - TokenTotals(apart.prompt_tokens, apart.completion_tokens)

    def _compare(self, engine: TokenTotals) -> None:
        meter, now_s = self._cell.meter, self._now_s()
        engine -= TokenTotals(meter.probes.prompt_tokens, meter.probes.completion_tokens)
        counted = TokenTotals(meter.prompt_tokens_total, meter.tokens_total)
        unknown = (meter.probes.unknown, meter.untold_total)
        if unknown != self._unknown or self._has_begun_again(engine):
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

    def _has_begun_again(self, engine: TokenTotals) -> bool:
        if not self._marks:
            return False
        grown = engine - self._marks[-1][1]
        return min(grown.prompt, grown.completion) < 0
