"""Compares, at moments when the engine is idle, the growth of its own counters with what this proxy counted. It changes
no count: what differs is for people, by an incident.

An instant at which nothing is in flight is the only one at which both have counted the same requests. A busy cell is
checked when it has such an instant. What the proxy's own probes used is taken off the engine's growth; a probe that did
not say what it used, or an engine that counts from 0 again, begins the comparison anew.
"""

import asyncio
import re
import time
from dataclasses import dataclass

from engine_agent.protocol.messages import TokenCheck
from engine_agent.proxy.cell import Cell
from engine_agent.proxy.engine_usage import fetch_counted_apart
from engine_agent.proxy.http_call import call

CHECK_INTERVAL_S = 5.0
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
    """The comparison of one cell; `Cell.token_check` has its last result."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._since: tuple[float, TokenTotals, TokenTotals] | None = None
        """When it began, and both totals then: the engine's and ours."""
        self._unknown_probes = 0
        self._seen: object = None

    async def run(self) -> None:
        """Compare for ever."""
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
        meter = self._cell.meter
        engine -= TokenTotals(meter.probes.prompt_tokens, meter.probes.completion_tokens)
        counted = TokenTotals(meter.prompt_tokens_total, meter.tokens_total)
        is_continued = self._since is not None and self._unknown_probes == meter.probes.unknown
        grown = engine - self._since[1] if self._since is not None else TokenTotals()
        if self._since is None or not is_continued or min(grown.prompt, grown.completion) < 0:
            self._since, self._unknown_probes = (time.time(), engine, counted), meter.probes.unknown
            grown = TokenTotals()
        since, _, first = self._since
        ours = counted - first
        self._cell.token_check = TokenCheck(
            round(since, 3), grown.prompt, grown.completion, ours.prompt, ours.completion
        )
