"""One campaign: faults in the order of a schedule on a fleet under load, and what must be true of it.

The fleet is given by what can be asked of it, so that `make chaos` and a scenario of the suite run the same campaign.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any, Protocol

import httpx

from bench.chaos.faults import INGRESS_PREFIX, TAKEN_WITHIN_S, Done, Surroundings, census, do
from bench.chaos.schedule import CONTROLS, Fault, Harm, Scope, Target

PASS_WITHIN_S = 15.0
"""Maximum age of the last pass, also after a fault of the processes that make passes."""
KNOWN_WITHIN_S = 5.0
"""Until then a pass may not have heard of a harm yet: agents report every 2 s."""
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Window:
    """From `begins` to `ends`, in seconds of the load's clock, requests that `cells` answered, or that were sent to
    `ingresses` (URLs), may fail. With `passes`, control loops may stand still too. The fault itself ends at `over`."""

    begins: float
    ends: float
    why: str
    cells: frozenset[str] = frozenset()
    ingresses: frozenset[str] = frozenset()
    passes: bool = False
    over: float = 0.0

    def overlaps(self, begins: float, ends: float) -> bool:
        return begins <= self.ends and ends >= self.begins


def closed(windows: Iterable[Window], now: float, pass_at: float) -> list[Window]:
    """The windows, once the fleet is whole by what the pass that ended at `pass_at` left: a pass that knew of a harm
    closes its window, an earlier one speaks of the time before."""
    return [
        replace(window, ends=now) if window.ends == FOREVER and pass_at > window.over + KNOWN_WITHIN_S else window
        for window in windows
    ]


class Request(Protocol):
    """What the load remembers of a request; `cell` is empty if none answered."""

    url: str
    began: float
    ended: float
    cell: str
    error: str


@dataclass(frozen=True, slots=True)
class PassSeen:
    """At `at`, in seconds of the load's clock, the last pass was `age_s` old."""

    at: float
    age_s: float


def unexcused(
    requests: Iterable[Request], windows: Sequence[Window], cells: Mapping[str, frozenset[str]]
) -> list[Request]:
    """Requests that failed where nothing had been done to what served them; `cells` are those of each ingress's region,
    by its URL."""
    return [request for request in requests if request.error and not _is_excused(request, windows, cells)]


def _is_excused(request: Request, windows: Sequence[Window], cells: Mapping[str, frozenset[str]]) -> bool:
    open_then = [window for window in windows if window.overlaps(request.began, request.ended)]
    harmed = frozenset[str]().union(*(window.cells for window in open_then))
    away = frozenset[str]().union(*(window.ingresses for window in open_then))
    if request.cell in harmed or request.url in away:
        return True
    # Or it went through another region's ingress, and ended with that.
    if any(request.cell in there and url in away for url, there in cells.items()):
        return True
    # Or no cell was left that could have answered it: none here, and none behind another ingress that was there.
    here = cells.get(request.url, frozenset())
    return not request.cell and bool(here) and all(there <= harmed or url in away for url, there in cells.items())


def late_passes(seen: Iterable[PassSeen], windows: Sequence[Window]) -> list[PassSeen]:
    """Returns the samples with a last pass that was too old although no fault excuses it."""
    late = (look for look in seen if look.age_s > PASS_WITHIN_S)
    excuses = [window for window in windows if window.passes]
    return [look for look in late if not any(window.overlaps(look.at - look.age_s, look.at) for window in excuses)]


def has_trail(kinds: Sequence[str], subjects: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an event or incident of one of these kinds names one of the subjects: a node, cell, region or ingress."""
    wanted = set(subjects)
    return any(row["kind"] in kinds and wanted & _named(row) for row in rows)


def _named(row: Mapping[str, Any]) -> set[str]:
    return {str(row.get(field, "")) for field in ("node", "cell", "region", "subject")}


POLL_S = 0.25
CALM_WITHIN_S = 300.0
"""Time to recover after the last fault. A machine counts as lost after 30 s, and a failed start of an engine is tried
again after up to 300 s."""
BACK_WITHIN_S = 5.0
"""HAProxy answers again within 0.4 s (docs/design/ingress.md#haproxy-is-the-ingress), later on a busy machine."""
LAUNCHED_WITHIN_S = 180.0
"""A control plane that was killed whole: PostgreSQL, migrations and the demo's seed come before the first pass."""
AWAY = (httpx.HTTPError, OSError, KeyError, ValueError)
"""Errors that a fleet under faults may return; the next sample tries again."""
AGENTS_BEYOND_NODES = "node agents beyond nodes"


@dataclass(frozen=True, slots=True)
class FleetUnderTest:
    """`cells` and `nodes` map ids to rows of the API. `sessions` maps each service and the launcher to its pid.

    `trail` gives the events and incidents since the campaign began."""

    home: Path
    web_url: str
    agents_url: str
    cells: Callable[[], Mapping[str, Any]]
    nodes: Callable[[], Mapping[str, Any]]
    ingress_urls: Callable[[], Mapping[str, str]]
    is_whole: Callable[[], bool]
    open_incidents: Callable[[], Sequence[str]]
    sessions: Callable[[], Mapping[str, int]]
    last_pass_age_s: Callable[[], float]
    trail: Callable[[], Iterable[Mapping[str, Any]]]


@dataclass
class Report:
    faults: list[str] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    longest_pass_gap_s: float = 0.0
    calm_after_s: float = 0.0
    broken: list[str] = field(default_factory=list)


class Campaign:
    """Does each fault when it is due, keeps the windows that they open, and judges at the end.

    `hostile_share` is the share of the full hostile load."""

    def __init__(
        self,
        fleet: FleetUnderTest,
        seed: int,
        say: Callable[[str], None] = lambda _: None,
        *,
        hostile_share: float = 0.1,
    ) -> None:
        self._fleet = fleet
        self._chance = Random(seed)
        self._say = say
        self._hostile_share = hostile_share
        self._began = 0.0
        self._windows: list[Window] = []
        self._passes: list[PassSeen] = []
        self._trails: list[tuple[Done, frozenset[str]]] = []
        self._cells: Mapping[str, Any] = {}
        self._nodes: Mapping[str, Any] = {}
        self._urls: Mapping[str, str] = {}
        self.report = Report()

    def run(self, faults: Sequence[Fault], requests: Sequence[Request]) -> Report:
        """Inject all faults, wait until the fleet is whole again, and check `requests`, to which a load appends."""
        before = Counter({**self._census(), AGENTS_BEYOND_NODES: 0})
        self._urls = self._fleet.ingress_urls()
        self._began = began = time.monotonic()
        undoing: list[Timer] = []
        try:
            for fault in faults:
                self._wait_until(began + fault.at_s)
                if done := self._inject(fault):
                    # On a separate thread: this one may be waiting for an answer of the paused process.
                    undoing.append(Timer(fault.lasts_s, done.undo))
                    undoing[-1].start()
        finally:
            for timer in undoing:
                timer.join()
        self._wait_for_calm(before)
        self._judge(before, requests)
        return self.report

    def _wait_until(self, until: float) -> None:
        while time.monotonic() < until:
            self._poll_fleet()
            time.sleep(POLL_S)

    def _inject(self, fault: Fault) -> Done | None:
        self._note_rows()
        now = time.monotonic()
        done = do(fault, self._surroundings(), self._chance)
        if done is None:
            self._say(f"{fault}: nothing of the kind runs")
            return None
        self._say(f"{now - self._began:5.0f} s  {done.subject}: {fault}")
        self.report.faults.append(f"{done.subject}: {fault}")
        of = self._cells_of(done.subject)
        self._windows.extend(self._windows_of(done, of, now))
        if not any(window.passes and window.overlaps(now, now) for window in self._windows):
            self._trails.append((done, of | {done.subject}))  # otherwise no process was running to write one
        return done

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            home=self._fleet.home,
            sessions=self._fleet.sessions(),
            roles={node["id"]: node["role"] for cell in self._cells.values() for node in cell["nodes"]},
            region_of={node: row["region"] for node, row in self._nodes.items()},
            ingress_urls=self._urls,
            web_url=self._fleet.web_url,
            agents_url=self._fleet.agents_url,
            hostile_share=self._hostile_share,
            taken_over_by=self._taken_over_by(self._cells),
        )

    def _note_rows(self) -> None:
        """Who is where now; while the control plane is away, who was where before."""
        with contextlib.suppress(*AWAY):
            self._cells, self._nodes = self._fleet.cells(), self._fleet.nodes()

    def _taken_over_by(self, before: Mapping[str, Any]) -> Callable[[str], str]:
        places = {node["id"]: (cell, node["rank"]) for cell, row in before.items() for node in row["nodes"]}

        def now_there(node: str) -> str:
            with contextlib.suppress(*AWAY):
                cell, rank = places[node]
                there = {each["rank"]: each["id"] for each in self._fleet.cells()[cell]["nodes"]}
                return str(there[rank]) if there.get(rank) not in (None, node) else ""
            return ""

        return now_there

    def _cells_of(self, subject: str) -> frozenset[str]:
        return frozenset(
            name
            for name, cell in self._cells.items()
            if cell["region"] == subject or subject in {node["id"] for node in cell["nodes"]}
        )

    def _cells_by_url(self) -> dict[str, frozenset[str]]:
        return {
            url: frozenset(name for name, cell in self._cells.items() if cell["region"] == region)
            for region, url in self._urls.items()
        }

    def _windows_of(self, done: Done, cells: frozenset[str], now: float) -> Iterator[Window]:
        fault, why = done.fault, f"{done.subject}: {done.fault}"
        over = now + (TAKEN_WITHIN_S if fault.harm is Harm.TWICE else fault.lasts_s)
        if fault.excuses in {Scope.CELL, Scope.REGION} and fault.harm is not Harm.CANNOT_WRITE:
            yield Window(now, FOREVER, why, cells=cells, over=over)
        if fault.excuses in {Scope.INGRESS, Scope.REGION, Scope.ALL}:
            region = done.subject.removeprefix(INGRESS_PREFIX)
            urls = self._urls.values() if fault.excuses is Scope.ALL else [self._urls.get(region, "")]
            yield Window(now, over + BACK_WITHIN_S, why, ingresses=frozenset(urls))
        if fault.target in CONTROLS:
            back_s = LAUNCHED_WITHIN_S if fault.target is Target.LAUNCHER else PASS_WITHIN_S
            yield Window(now, over + back_s, why, passes=True)

    def _poll_fleet(self) -> None:
        """Windows stay open until the fleet is whole; how old the last pass is counts while web can say it."""
        with contextlib.suppress(*AWAY):
            now, age_s = time.monotonic(), self._fleet.last_pass_age_s()
            self._passes.append(PassSeen(now, age_s))
            if any(window.ends == FOREVER for window in self._windows) and self._is_whole():
                self._windows = closed(self._windows, now, now - age_s)

    def _wait_for_calm(self, before: Counter[str]) -> None:
        """The last fault may be seconds old: what it killed comes back, and is noted, after that."""
        began = time.monotonic()
        while time.monotonic() - began < CALM_WITHIN_S:
            self._poll_fleet()
            if self._is_whole() and not self._open_incidents() and self._is_noted(before):
                break
            time.sleep(POLL_S)
        self.report.calm_after_s = time.monotonic() - began

    def _judge(self, before: Counter[str], requests: Sequence[Request]) -> None:
        report, broken = self.report, self.report.broken
        if not self._is_whole():
            broken.append(f"not whole {CALM_WITHIN_S:.0f} s after the last fault")
        broken += [f"incident still open: {summary}" for summary in self._open_incidents()]
        after = self._census()
        for kind in sorted(set(before) | set(after)):
            if before[kind] != after[kind]:
                broken.append(f"{kind}: {before[kind]} before, {after[kind]} after")
        report.requests, report.failed = len(requests), sum(bool(request.error) for request in requests)
        report.longest_pass_gap_s = max((seen.age_s for seen in self._passes), default=0.0)
        for request in unexcused(list(requests), self._windows, self._cells_by_url()):
            who = f"{request.cell or 'no cell'} through {request.url}"
            at_s, took_s = request.began - self._began, request.ended - request.began
            broken.append(
                f"request of {at_s:.1f} s failed after {took_s:.1f} s on {who}, outside of what was promised: "
                f"{request.error}"
            )
        if late := late_passes(self._passes, self._windows):
            broken.append(f"the last pass was {max(look.age_s for look in late):.0f} s old, and nothing harmed passes")
        broken += self._missing_trails()

    def _is_noted(self, before: Counter[str]) -> bool:
        with contextlib.suppress(*AWAY):
            return self._census() == before and not any(self._missing_trails())
        return False

    def _census(self) -> Counter[str]:
        """What runs. Spare machines come and go, each with its agent: of agents those count that no node has, or that
        a node lacks."""
        counts = census(self._fleet.home, self._fleet.sessions())
        nodes = sum(node["state"] != "retired" for node in self._fleet.nodes().values())
        counts[AGENTS_BEYOND_NODES] = counts.pop(Target.NODE_AGENT, 0) - nodes
        return counts

    def _missing_trails(self) -> Iterator[str]:
        rows = list(self._fleet.trail())
        for done, subjects in self._trails:
            if done.fault.trail and not has_trail(done.fault.trail, subjects, rows):
                yield f"no {' or '.join(done.fault.trail)} names {done.subject} after {done.fault}"

    def _is_whole(self) -> bool:
        with contextlib.suppress(*AWAY):
            return self._fleet.is_whole()
        return False

    def _open_incidents(self) -> Sequence[str]:
        """If it cannot be asked now, that counts as open."""
        with contextlib.suppress(*AWAY):
            return self._fleet.open_incidents()
        return ["the control plane does not answer"]
