"""One campaign: faults in the order of a schedule on a fleet under load, and what must be true of it.

The fleet is given by what can be asked of it, so that `make chaos` and a scenario of the suite run the same campaign.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Timer
from typing import Any

import httpx

from bench.chaos.faults import Done, census, do
from bench.chaos.schedule import OF_CELLS, Fault, Harm, Request, Target, Window, unexcused

POLL_S = 0.25
CALM_WITHIN_S = 300.0
"""How long after the last fault everything must be as before: a machine that is judged lost takes 30 s, a start of an
engine that failed before is tried again after as long as 300 s."""
BACK_WITHIN_S = 5.0
"""HAProxy is back within 0.4 s (docs/bench/ingress_changes.md); a busy machine takes its time to run it."""


@dataclass(frozen=True, slots=True)
class FleetUnderTest:
    """`cells` maps each cell to its row of the API. `sessions` maps each service to its pid, as `up.json` does."""

    home: Path
    cells: Callable[[], Mapping[str, Any]]
    is_whole: Callable[[], bool]
    open_incidents: Callable[[], Sequence[str]]
    sessions: Callable[[], Mapping[str, int]]
    last_pass_age_s: Callable[[], float]


@dataclass
class Report:
    """What happened, and each promise that did not hold."""

    faults: list[str] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    longest_pass_gap_s: float = 0.0
    calm_after_s: float = 0.0
    broken: list[str] = field(default_factory=list)


class Campaign:
    """Does each fault when it is due, keeps the windows that they open, and judges at the end."""

    def __init__(self, fleet: FleetUnderTest, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
        self._fleet = fleet
        self._chance = random.Random(seed)
        self._say = say
        self._windows: list[Window] = []
        self.report = Report()

    def run(self, faults: Sequence[Fault], requests: Sequence[Request]) -> Report:
        """Do all of them, wait until the fleet is whole again, and judge `requests`, which a load appends to."""
        before = census(self._fleet.home, self._fleet.sessions())
        began = time.monotonic()
        undoing: list[Timer] = []
        try:
            for fault in faults:
                self._wait_until(began + fault.at_s)
                if done := self._do(fault):
                    # On a thread of its own: this one may be waiting for an answer of the process that is paused.
                    undoing.append(Timer(fault.lasts_s, done.undo))
                    undoing[-1].start()
        finally:
            for timer in undoing:
                timer.join()
        self._wait_for_calm()
        self._judge(before, requests)
        return self.report

    def _wait_until(self, until: float) -> None:
        while time.monotonic() < until:
            self._look()
            time.sleep(POLL_S)

    def _do(self, fault: Fault) -> Done | None:
        cells = self._cells()
        nodes = {node["id"] for cell in cells.values() for node in cell["nodes"]}
        done = do(fault, self._fleet.home, self._fleet.sessions(), nodes, self._chance)
        if done is None:
            self._say(f"{fault}: nothing of the kind runs")
            return None
        self._say(f"{done.subject}: {fault}")
        self.report.faults.append(f"{done.subject}: {fault}")
        self._windows.extend(_windows(done, cells, time.monotonic()))
        return done

    def _look(self) -> None:
        """Windows stay open until the fleet is whole; how old the last pass is counts while its parts are there."""
        with contextlib.suppress(httpx.HTTPError, OSError, KeyError):
            self.report.longest_pass_gap_s = max(self.report.longest_pass_gap_s, self._fleet.last_pass_age_s())
        if any(window.ends == float("inf") for window in self._windows) and self._is_whole():
            now = time.monotonic()
            self._windows = [replace(window, ends=min(window.ends, now)) for window in self._windows]

    def _wait_for_calm(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < CALM_WITHIN_S:
            self._look()
            if self._is_whole() and not self._open_incidents():
                break
            time.sleep(POLL_S)
        self.report.calm_after_s = time.monotonic() - began

    def _judge(self, before: Counter[Target], requests: Sequence[Request]) -> None:
        report, broken = self.report, self.report.broken
        if not self._is_whole():
            broken.append(f"not whole {CALM_WITHIN_S:.0f} s after the last fault")
        broken += [f"incident still open: {summary}" for summary in self._open_incidents() or []]
        after = census(self._fleet.home, self._fleet.sessions())
        for kind in sorted(set(before) | set(after)):
            if before[kind] != after[kind]:
                broken.append(f"{kind}: {before[kind]} before, {after[kind]} after")
        report.requests, report.failed = len(requests), sum(bool(request.error) for request in requests)
        for request in unexcused(list(requests), self._windows):
            broken.append(
                f"request failed on {request.cell or 'no cell'} outside of what was promised: {request.error}"
            )

    def _cells(self) -> Mapping[str, Any]:
        with contextlib.suppress(httpx.HTTPError, OSError):
            return self._fleet.cells()
        return {}

    def _is_whole(self) -> bool:
        with contextlib.suppress(httpx.HTTPError, OSError, KeyError):
            return self._fleet.is_whole()
        return False

    def _open_incidents(self) -> Sequence[str] | None:
        """None: it cannot be asked now, which counts as open."""
        with contextlib.suppress(httpx.HTTPError, OSError):
            return self._fleet.open_incidents()
        return ["the control plane does not answer"]


def _windows(done: Done, cells: Mapping[str, Any], now: float) -> Iterator[Window]:
    """What is not promised because of this fault: streams of the cell whose engine or proxy was harmed, and all of a
    region whose HAProxy was."""
    fault = done.fault
    why = f"{done.subject}: {fault}"
    if fault.target is Target.HAPROXY:
        yield Window(now, now + fault.lasts_s + BACK_WITHIN_S, frozenset(), why)
    elif fault.target in OF_CELLS and fault.harm is not Harm.CANNOT_WRITE:
        of = frozenset(name for name, cell in cells.items() if done.subject in {node["id"] for node in cell["nodes"]})
        if of or not cells:
            yield Window(now, float("inf"), of, why)
