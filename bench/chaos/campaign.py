"""One campaign: single faults in the order of a seed on a fleet under load, and what must be true of it.

The fleet is given by what can be asked of it: `make chaos` and a scenario of the suite run the same campaign."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any

import httpx

from bench.chaos.faults import TAKEN_WITHIN_S, Done, Surroundings, census, do
from bench.chaos.schedule import CONTROLS, Fault, Harm, Target
from bench.chaos.users import Outcome, Request
from bench.chaos.verdict import FaultWindow, PassSeen, Window, has_trail, late_passes, unexcused
from engine_agent.protocol.continuation import COUNTS_PATH

PASS_WITHIN_S = 15.0
"""Until then a control process that was faulted makes passes again."""
POLL_S = 0.5
CALM_WITHIN_S = 300.0
"""Time to recover after a fault. A machine counts as lost after 30 s, and a failed start of an engine is tried again
after up to 300 s."""
LAUNCHED_WITHIN_S = 180.0
"""A control plane that was killed whole: PostgreSQL, migrations and the demo's seed come before the first pass."""
SLOW_S = 60.0
"""After that the campaign says what it waits for."""
PAUSE_S = 1.0
"""A longer pause within a stream is named after the fault during which it ended."""
AWAY = (httpx.HTTPError, OSError, KeyError, ValueError)
"""Errors that a fleet under faults may return; the next sample tries again."""
AGENTS_BEYOND_NODES = "node agents beyond nodes"


@dataclass(frozen=True, slots=True)
class FleetUnderTest:
    """`cells`, `nodes` and `ingresses` map ids to rows of the API. `sessions` maps each service and the launcher to its
    pid. `is_whole`: all cells serve and nothing moves. `trail` gives the events and incidents since the campaign began.
    `order` posts to a path of the API, with a reason; `roll_out` starts a rollout."""

    home: Path
    web_url: str
    agents_url: str
    cells: Callable[[], Mapping[str, Any]]
    nodes: Callable[[], Mapping[str, Any]]
    ingresses: Callable[[], Mapping[str, Any]]
    is_whole: Callable[[], bool]
    open_incidents: Callable[[], Sequence[str]]
    sessions: Callable[[], Mapping[str, int]]
    last_pass_age_s: Callable[[], float]
    trail: Callable[[], Iterable[Mapping[str, Any]]]
    order: Callable[[str], None]
    roll_out: Callable[[], None]


@dataclass
class Report:
    faults: list[str] = field(default_factory=list)
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    exempt: int = 0
    """Repeated streams that `EXEMPTIONS` covers."""
    tokens: int = 0
    attempts: int = 0
    relays: Counter[str] = field(default_factory=Counter)
    """Counts of all relays, such as `continued:connection_lost`."""
    longest_pauses_s: list[float] = field(default_factory=list)
    """Longest pause of each stream between two events, the longest first."""
    longest_pass_gap_s: float = 0.0
    calm_after_s: float = 0.0
    broken: list[str] = field(default_factory=list)


class Campaign:
    """Injects each fault when the fleet is whole, and judges at the end. Faults come `every_s` apart at the least.

    `hostile_share` is the share of the full hostile load."""

    def __init__(
        self,
        fleet: FleetUnderTest,
        seed: int,
        say: Callable[[str], None] = lambda _: None,
        *,
        every_s: float = 5.0,
        hostile_share: float = 0.1,
    ) -> None:
        self._fleet, self._seed, self._say = fleet, seed, say
        self._every_s, self._hostile_share = every_s, hostile_share
        self._began = 0.0
        self._windows: list[Window] = []
        self._cuts: list[FaultWindow] = []
        self._passes: list[PassSeen] = []
        self._trails: list[tuple[Done, frozenset[str]]] = []
        self._cells: Mapping[str, Any] = {}
        self._nodes: Mapping[str, Any] = {}
        self._ingresses: Mapping[str, Any] = {}
        self._said: set[int] = set()
        self._relays = RelayCounts(fleet.home)
        self.report = Report()

    def run(self, faults: Iterable[Fault], requests: Sequence[Request], seconds: float = float("inf")) -> Report:
        """Inject faults for some seconds, wait until the fleet is whole again, and check `requests`, to which users
        append."""
        before = Counter({**self._census(), AGENTS_BEYOND_NODES: 0})
        self._ingresses = self._fleet.ingresses()
        self._began = began = time.monotonic()
        for number, fault in enumerate(faults):
            if time.monotonic() - began > seconds:
                break
            if not self._inject(fault, Random(f"{self._seed} {number}")):
                continue
            self.report.calm_after_s = self._wait_for_calm(before)
            self._say_new(requests)
            if self.report.calm_after_s >= CALM_WITHIN_S:
                break
        self._judge(before, requests)
        return self.report

    def _inject(self, fault: Fault, chance: Random) -> bool:
        """Do a fault and undo it when it is over. Returns False if nothing of its kind runs."""
        with contextlib.suppress(*AWAY):
            self._cells, self._nodes = self._fleet.cells(), self._fleet.nodes()
        now = time.monotonic()
        try:
            done = do(fault, self._surroundings(), chance)
        except (SystemExit, *AWAY) as error:
            self._say(f"{fault}: could not be ordered: {error}")
            return False
        if done is None:
            self._say(f"{fault}: nothing of the kind runs")
            return False
        self._say(f"{now - self._began:5.0f} s  {done.subject}: {fault}")
        self.report.faults.append(f"{done.subject}: {fault}")
        of = self._cells_of(done.subject)
        lasts_s = TAKEN_WITHIN_S if fault.harm is Harm.TWICE else fault.lasts_s
        self._cuts.append(FaultWindow(now, now + lasts_s, fault, self._urls_of(done.subject)))
        if fault.target in CONTROLS:
            back_s = LAUNCHED_WITHIN_S if fault.target is Target.LAUNCHER else PASS_WITHIN_S
            self._windows.append(Window(now, now + lasts_s + back_s, str(fault)))
        elif fault.trail:
            self._trails.append((done, of | {done.subject}))  # otherwise no process was running to write one
        # On a separate thread: this one may be waiting for an answer of the paused process.
        undoing = Timer(fault.lasts_s, done.undo)
        undoing.start()
        self._wait_until(now + max(fault.lasts_s, self._every_s))
        undoing.join()
        return True

    def _say_new(self, requests: Sequence[Request]) -> None:
        """Report each request without an excuse soon after its end, while its traces in the logs are easy to find."""
        ended = [request for request in requests if request.ended and id(request) not in self._said]
        self._said.update(map(id, ended))
        found = unexcused(ended, self._cuts)
        for request in found:
            self._say(f"        request of {request.began - self._began:.1f} s: {request}")
        if exempt := sum(request.outcome is not Outcome.COMPLETE for request in ended) - len(found):
            self._say(f"        {exempt} connections broke, which is exempt")
        if (paused_s := max((request.longest_pause_s for request in ended), default=0.0)) >= PAUSE_S:
            self._say(f"        the longest pause within a stream was {paused_s:.1f} s")

    def _wait_until(self, until: float) -> None:
        while time.monotonic() < until:
            self._poll_fleet()
            time.sleep(POLL_S)

    def _surroundings(self) -> Surroundings:
        regions = {node: row["region"] for node, row in self._nodes.items()}
        return Surroundings(
            home=self._fleet.home,
            sessions=self._fleet.sessions(),
            roles={node["id"]: node["role"] for cell in self._cells.values() for node in cell["nodes"]},
            cells=[name for name, cell in self._cells.items() if cell["state"] == "ready"],
            region_of=regions | {name: row["region"] for name, row in self._ingresses.items()},
            ingress_urls=self._urls(),
            web_url=self._fleet.web_url,
            agents_url=self._fleet.agents_url,
            hostile_share=self._hostile_share,
            taken_over_by=self._taken_over_by(self._cells),
            order=self._fleet.order,
            roll_out=self._fleet.roll_out,
        )

    def _urls(self) -> dict[str, str]:
        return {name: f"http://{row['address']}:{row['port']}" for name, row in self._ingresses.items()}

    def _urls_of(self, subject: str) -> frozenset[str]:
        """URLs of an ingress, of the ingresses of a region, or of all if the subject is neither."""
        urls = self._urls()
        named = {name for name, row in self._ingresses.items() if subject in (name, row["region"])}
        return frozenset(urls[name] for name in named or urls)

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

    def _poll_fleet(self) -> None:
        """How old the last pass is counts while web can say it."""
        self._relays.poll()
        with contextlib.suppress(*AWAY):
            self._passes.append(PassSeen(time.monotonic(), self._fleet.last_pass_age_s()))

    def _wait_for_calm(self, before: Counter[str]) -> float:
        """Waits until all of the fleet is back, and what happened is noted. Returns how long it took."""
        began, was_said = time.monotonic(), False
        while (took_s := time.monotonic() - began) < CALM_WITHIN_S:
            self._poll_fleet()
            if took_s > SLOW_S and not was_said:
                self._say(f"        not yet whole after {took_s:.0f} s: {', '.join(self._missing(before)) or 'cells'}")
                was_said = True
            if self._is_whole() and self._ingresses_serve() and not self._open_incidents() and self._is_noted(before):
                break
            time.sleep(POLL_S)
        return took_s

    def _ingresses_serve(self) -> bool:
        with contextlib.suppress(*AWAY):
            return all(httpx.get(f"{url}/health", timeout=5).is_success for url in self._urls().values())
        return False

    def _judge(self, before: Counter[str], requests: Sequence[Request]) -> None:
        report, broken = self.report, self.report.broken
        if report.calm_after_s >= CALM_WITHIN_S:
            broken.append(f"not whole {CALM_WITHIN_S:.0f} s after {report.faults[-1]}")
        if not self._is_whole():
            broken.append("not all cells serve")
        broken += [f"incident still open: {summary}" for summary in self._open_incidents()]
        with contextlib.suppress(*AWAY):
            after = self._census()
            for kind in sorted(set(before) | set(after)):
                if before[kind] != after[kind]:
                    broken.append(f"{kind}: {before[kind]} before, {after[kind]} after")
        report.longest_pass_gap_s = max((seen.age_s for seen in self._passes), default=0.0)
        report.relays = self._relays.totals
        if late := late_passes(self._passes, self._windows):
            broken.append(f"the last pass was {max(look.age_s for look in late):.0f} s old, and nothing harmed passes")
        with contextlib.suppress(*AWAY):
            broken += self._missing_trails()
        self._judge_requests(requests)

    def _judge_requests(self, requests: Sequence[Request]) -> None:
        report = self.report
        ended = [request for request in requests if request.ended]
        report.requests, report.outcomes = len(ended), Counter(request.outcome for request in ended)
        report.tokens = sum(request.usage[1] for request in ended)
        report.attempts = sum(len(request.attempts) for request in ended)
        report.longest_pauses_s = sorted((request.longest_pause_s for request in ended), reverse=True)
        found = unexcused(ended, self._cuts)
        report.exempt = sum(request.outcome is not Outcome.COMPLETE for request in ended) - len(found)
        report.broken += [f"request of {request.began - self._began:.1f} s: {request}" for request in found]

    def _missing(self, before: Counter[str]) -> list[str]:
        with contextlib.suppress(*AWAY):
            after = self._census()
            gone = [f"{kind} {after[kind]} of {before[kind]}" for kind in before | after if before[kind] != after[kind]]
            return [*gone, *self._missing_trails(), *self._open_incidents()]
        return ["the control plane does not answer"]

    def _is_noted(self, before: Counter[str]) -> bool:
        with contextlib.suppress(*AWAY):
            return self._census() == before and not self._missing_trails()
        return False

    def _census(self) -> Counter[str]:
        """What runs. Spare machines come and go, each with its agent: of agents those count that no node has, or that
        a node lacks."""
        counts = census(self._fleet.home, self._fleet.sessions())
        nodes = sum(node["state"] != "retired" for node in self._fleet.nodes().values())
        counts[AGENTS_BEYOND_NODES] = counts.pop(Target.NODE_AGENT, 0) - nodes
        return counts

    def _missing_trails(self) -> Sequence[str]:
        """Forgets trails that were found: the list of events is cut off after a page."""
        if self._trails:
            rows = list(self._fleet.trail())
            self._trails = [
                (done, subjects) for done, subjects in self._trails if not has_trail(done.fault.trail, subjects, rows)
            ]
        return [
            f"no {' or '.join(done.fault.trail)} names {done.subject} after {done.fault}" for done, _ in self._trails
        ]

    def _is_whole(self) -> bool:
        with contextlib.suppress(*AWAY):
            return self._fleet.is_whole()
        return False

    def _open_incidents(self) -> Sequence[str]:
        """If it cannot be asked now, that counts as open."""
        with contextlib.suppress(*AWAY):
            return self._fleet.open_incidents()
        return ["the control plane does not answer"]


_COUNTS_WITHIN_S = 0.5
"""For an answer. A paused relay must not delay the next fault."""


class RelayCounts:
    """Adds up what all relays counted since the first poll. The last counts of a relay before its death are lost."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._first: dict[str, Counter[str]] = {}
        self._last: dict[str, Counter[str]] = {}
        """By the life of a relay."""
        self._has_polled = False

    def poll(self) -> None:
        """Reads the counts of all relays that answer."""
        for socket in sorted(self._home.glob("ingresses/*/relay/[0-9]*.sock")):
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                life, counts = _read(socket)
                if not self._has_polled:
                    self._first[life] = counts
                self._last[life] = counts
        self._has_polled = True

    @property
    def totals(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for life, counts in self._last.items():
            found.update(counts - self._first.get(life, Counter()))
        return found


def _read(socket: Path) -> tuple[str, Counter[str]]:
    """The life of a relay, and its counts of all pools together."""
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://relay", timeout=_COUNTS_WITHIN_S
    ) as http:
        document = http.get(COUNTS_PATH).raise_for_status().json()
    found = Counter({f"refused:{reason}": count for reason, count in document["refused"].items()})
    for pool in document["pools"].values():
        found["relayed"] += pool.get("relayed_total", 0)
        found["repeated"] += pool.get("repeated_total", 0)
        for kind in ("continued", "cut", "unable"):
            found.update({f"{kind}:{reason}": count for reason, count in pool.get(f"{kind}_total", {}).items()})
    return document["life"], found
