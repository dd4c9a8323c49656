"""Trials of a laboratory's fleet: each round harms a host under streams, and reports the outcomes of the streams, the
time to heal, and broken promises.

No request fails. A stream may break off if it ran on a cell of that host, or through it: streams between regions pass
two ingresses. If streams of the deployment continue at other cells, only those of clients of that host may break off,
and each complete one has the text of an undisturbed one. Everything else continues in the same process, and no other
node is lost."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import inf
from statistics import median

from lab.hosts import client
from lab.hosts.fleet import DEPLOYMENT, READY_WITHIN_S, Fleet, Row
from lab.hosts.load import LONGEST_S, MAX_TOKENS, Stream, streaming
from lab.hosts.places import Places
from lab.hosts.topology import CONTROL_SITE, NoLaboratory, Role, Topology

RESTARTS = frozenset({"cell.failed", "cell.lost", "cell.starting", "cell.draining", "node.agent_restarted"})
LOSSES = frozenset({"node.lost", "node.faulty"})


@dataclass(frozen=True, slots=True)
class Harmed:
    """Everything that a harm may stop: hosts, and what ran on them. `nodes`: ids of nodes and ingresses. `continues`:
    streams continue at other cells."""

    hosts: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    cells: frozenset[str] = frozenset()
    continues: bool = False

    def excuses(self, stream: Stream) -> bool:
        if self.continues:
            return bool(stream.cell) and stream.host in self.hosts
        ran_over_it = stream.cell in self.cells or stream.host in self.hosts or stream.chosen_by in self.nodes
        return bool(stream.cell) and ran_over_it


@dataclass(frozen=True, slots=True)
class Counts:
    """Streams of a round. `excused`: broke off where the harm was; `later`: answered at another try; `crossed`:
    answered in another region."""

    sent: int
    later: int
    crossed: int
    excused: int
    failed: int
    broken: int

    def __str__(self) -> str:
        return (
            f"{self.sent} streams: {self.failed} failed, {self.broken} broke off elsewhere, {self.excused} broke off "
            f"on what was harmed, {self.later} answered at another try, {self.crossed} in another region"
        )


def count(streams: Iterable[Stream], harmed: Harmed) -> Counts:
    all_of_them = list(streams)
    broken = [stream for stream in all_of_them if stream.error and stream.cell]
    excused = [stream for stream in broken if harmed.excuses(stream)]
    return Counts(
        sent=len(all_of_them),
        later=sum(stream.tries > 1 and not stream.error for stream in all_of_them),
        crossed=sum(bool(stream.cell) and stream.served_in != stream.region for stream in all_of_them),
        excused=len(excused),
        failed=sum(bool(stream.error) and not stream.cell for stream in all_of_them),
        broken=len(broken) - len(excused),
    )


def unexcused(streams: Iterable[Stream], harmed: Harmed) -> list[str]:
    errors = (
        f"{stream.region} through {stream.host}{_on_cell(stream)}: {stream.error}"
        for stream in streams
        if stream.error and not harmed.excuses(stream)
    )
    return list(dict.fromkeys(errors))


def other_texts(streams: Iterable[Stream], at: float) -> list[str]:
    """Complete streams that ended after this time with another text than those before it. All have one prompt."""
    whole = [stream for stream in streams if stream.cell and stream.ended and not stream.error]
    before = {stream.text for stream in whole if stream.ended < at}
    if len(before) != 1:
        return [f"there are {len(before)} texts before anything happened"]
    differ = sum(stream.text not in before for stream in whole)
    return [f"{differ} of {len(whole)} complete streams have another text"] if differ else []


def paused(streams: Iterable[Stream], harmed: Harmed, at: float) -> list[float]:
    """The longest pauses of complete streams that ran on a harmed cell at this time, in order."""
    there = (each for each in streams if each.cell in harmed.cells and each.began < at < each.ended and not each.error)
    return sorted(each.longest_pause_s for each in there)


def _until_one_is_complete(streams: Sequence[Stream]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not any(stream.ended and not stream.error for stream in streams) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _on_cell(stream: Stream) -> str:
    if not stream.cell:
        return ""
    return f" on {stream.cell}{f' by {stream.chosen_by}' if stream.served_in != stream.region else ''}"


def engines(nodes: Iterable[Row]) -> dict[str, tuple[str, int, int]]:
    """Node -> its cell, and generation and process of its engine, of all that run one."""
    return {
        node["id"]: (node["cell"], node["engine"]["generation"], node["engine"]["pid"])
        for node in nodes
        if node["cell"] and node["engine"]["pid"]
    }


def restarted(
    before: Mapping[str, tuple[str, int, int]], after: Mapping[str, tuple[str, int, int]], harmed: Harmed
) -> list[str]:
    """Engines of other cells that no longer run as they ran."""
    return [
        f"the engine of {cell} on {node} is no longer process {pid} of generation {generation}"
        for node, (cell, generation, pid) in before.items()
        if cell not in harmed.cells and node not in harmed.nodes and after.get(node) != (cell, generation, pid)
    ]


def wrong_events(events: Iterable[Row], harmed: Harmed) -> Iterator[str]:
    for event in events:
        ours = event["node"] in harmed.nodes or event["cell"] in harmed.cells
        if event["kind"] in RESTARTS | LOSSES and not ours:
            yield f"{event['kind']}: {event['message']}"


def spread(seconds: Collection[float]) -> str:
    """`median 12.3 s (10.1 to 15.0 s of 5)`; times are too few for more."""
    if not seconds:
        return "never"
    return f"median {median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f} s, of {len(seconds)})"


BEFORE_S, AFTER_S = 5.0, 10.0
"""Streams that run before something happens, and after it is over."""
POLL_S = 0.5
WHOLE_WITHIN_S = 300.0
STEPS_S = (3.0, -3.0, 300.0, -300.0)
"""Clock offsets: within the agents' tolerance, and far beyond it."""


class Kind(StrEnum):
    POWER_OFF = "power-off"
    REGION_CUT = "region-cut"
    ONE_WAY = "one-way"
    DEAF = "deaf"
    SKEW = "skew"


class Target(StrEnum):
    LEADER = "leader"
    FOLLOWER = "follower"
    SPARE = "spare"
    INGRESS = "ingress"
    CONTROL = "control"
    """The last host of the control plane, or with clocks the first."""


TARGETS = {
    Kind.POWER_OFF: tuple(Target),
    Kind.REGION_CUT: (),
    Kind.ONE_WAY: (Target.LEADER, Target.FOLLOWER),
    Kind.DEAF: (Target.LEADER, Target.FOLLOWER),
    Kind.SKEW: (Target.CONTROL, Target.LEADER, Target.INGRESS),
}


@dataclass(frozen=True, slots=True)
class _Step:
    """One round: what happens to whom and what ends it, which `lasts_s` at least. `heal`: waits until the fleet has
    healed itself, and returns how many seconds that took; None: there is nothing to heal."""

    title: str
    harmed: Harmed
    begin: Callable[[], object]
    end: Callable[[], object]
    heal: Callable[[], float] | None = None
    lasts_s: float = 0.0


@dataclass
class Trial:
    """Rounds of one kind. `rate`: streams a second in all, of so many `tokens`. `seconds`: how long each harm lasts at
    least. `say`: where it goes, a line each; `wrong`: what was found; `pauses_s`: of streams that continued."""

    places: Places
    topology: Topology
    fleet: Fleet
    forwards: list[client.Forward]
    rate: float
    seconds: float
    say: Callable[[str], None]
    tokens: int = MAX_TOKENS
    wrong: list[str] = field(default_factory=list)
    healed_s: dict[str, list[float]] = field(default_factory=dict)
    pauses_s: dict[str, list[float]] = field(default_factory=dict)

    def run(self, kind: Kind, targets: Sequence[Target], rounds: int) -> bool:
        for number in range(rounds):
            for name, step in self._steps(kind, targets):
                self._until_whole()
                self._round(number + 1, name, step())
        for name, seconds in self.healed_s.items():
            self.say(f"{kind} of {name}: healed after {spread(seconds)}")
        for name, seconds in self.pauses_s.items():
            self.say(f"{kind} of {name}: streams of its cell continued, with pauses of {spread(seconds)}")
        verdict = f"{len(self.wrong)} things went wrong" if self.wrong else "all went well"
        self.say(f"lab trial {kind}: {verdict}")
        return not self.wrong

    # --- what is tried -----------------------------------------------------------------------------------------------

    def _steps(self, kind: Kind, targets: Sequence[Target]) -> Iterator[tuple[str, Callable[[], _Step]]]:
        """Names, and what is done once the fleet is whole: who leads by then is not known before."""
        if kind is Kind.REGION_CUT:
            for region in self.topology.regions[:1]:
                yield region, lambda region=region: self._region_cut(region)  # type: ignore[misc]
            return
        for target in targets or TARGETS[kind]:
            if kind is Kind.SKEW:
                for by_s in STEPS_S:
                    yield f"{target}, {by_s:+g} s", lambda t=target, s=by_s: self._skew(t, s)  # type: ignore[misc]
            else:
                yield target, lambda t=target: self._one_host(kind, t)  # type: ignore[misc]

    def _region_cut(self, region: str) -> _Step:
        return _Step(
            title=f"{region} cut off from the control plane for {self.seconds:g} s",
            harmed=Harmed(),
            begin=lambda: client.ask(self.places, "cut", name=region, other=CONTROL_SITE, lost="both"),
            end=lambda: client.ask(self.places, "heal", name=None),
            lasts_s=self.seconds,
        )

    def _one_host(self, kind: Kind, target: Target) -> _Step:
        host, cell = self._chosen(target)
        harmed = self._harmed(host, cell)
        heal = partial(self._healed_after, harmed) if cell else None
        what = f"{host} ({target}{f' of {cell}' if cell else ''})"
        if kind is Kind.POWER_OFF:
            off, boot = (lambda do=do: client.ask(self.places, do, name=host) for do in ("power-off", "boot"))
            return _Step(f"power-off of {what}", harmed, off, boot, heal, lasts_s=self.seconds)
        lost = "sent" if kind is Kind.ONE_WAY else "received"
        return _Step(
            title=f"{what} is {'not heard' if kind is Kind.ONE_WAY else 'deaf'}",
            harmed=harmed,
            begin=lambda: client.ask(self.places, "cut", name=host, other=None, lost=lost),
            end=lambda: client.ask(self.places, "heal", name=host),
            heal=heal,
            lasts_s=self.seconds,
        )

    def _skew(self, target: Target, by_s: float) -> _Step:
        host, _ = self._chosen(target, first=True)
        return _Step(
            title=f"clock of {host} ({target}) set {by_s:+g} s",
            harmed=Harmed(),
            begin=lambda: client.ask(self.places, "skew", name=host, seconds=by_s),
            end=lambda: client.ask(self.places, "skew", name=host, seconds=0.0),
            lasts_s=self.seconds,
        )

    def _chosen(self, target: Target, *, first: bool = False) -> tuple[str, str]:
        if target in {Target.INGRESS, Target.CONTROL}:
            role = Role.INGRESS if target is Target.INGRESS else Role.CONTROL
            names = [host.name for host in self.topology.hosts.values() if host.role is role]
            return names[0 if target is Target.INGRESS or first else -1], ""
        hosts = self._hosts()
        for node in sorted(self.fleet.rows("nodes"), key=lambda row: str(row["id"])):
            if node["role"] == target and node["id"] in hosts and node["state"] == "ready":
                return hosts[node["id"]], node["cell"] or ""
        raise NoLaboratory(f"There is no {target} in this laboratory.")

    def _harmed(self, host: str, cell: str) -> Harmed:
        here = frozenset(node for node, name in self._hosts().items() if name == host)
        return Harmed(frozenset({host}), here, frozenset({cell} if cell else ()), continues=self._continues())

    def _continues(self) -> bool:
        return bool(self.fleet.ask("GET", f"traffic/policies/{DEPLOYMENT}/")["continuation"])

    # --- one round ---------------------------------------------------------------------------------------------------

    def _round(self, number: int, name: str, step: _Step) -> None:
        since, before = self._last_event(), engines(self.fleet.rows("nodes"))
        with streaming(self._urls(), DEPLOYMENT, self.rate, self.tokens) as streams:
            time.sleep(BEFORE_S)
            _until_one_is_complete(streams)
            began = time.monotonic()
            step.begin()
            try:
                healed_s = step.heal() if step.heal else None
                time.sleep(max(0.0, AFTER_S, began + step.lasts_s - time.monotonic()))
            finally:
                step.end()
            time.sleep(AFTER_S)
        problems = ["it was not healed"] if healed_s == inf else []
        problems += self._whole_again()
        problems += unexcused(streams, step.harmed)[:5]
        problems += other_texts(streams, began)
        problems += restarted(before, engines(self.fleet.rows("nodes")), step.harmed)
        problems += wrong_events(self._events(since), step.harmed)
        healed = f"; healed after {healed_s:.1f} s" if healed_s is not None else ""
        self.say(f"{number}. {step.title}: {count(streams, step.harmed)}{healed}")
        for problem in problems:
            self.say(f"  WRONG: {problem}")
        self.wrong += problems
        if healed_s is not None:
            self.healed_s.setdefault(name, []).append(healed_s)
        if pauses := paused(streams, step.harmed, began):
            self.pauses_s.setdefault(name, []).extend(pauses)

    def _healed_after(self, harmed: Harmed) -> float:
        began = time.monotonic()
        deadline = began + READY_WITHIN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(NoLaboratory):  # web may be slow
                cells = [row for row in self.fleet.rows("cells") if row["id"] in harmed.cells]
                members = {node["id"] for row in cells for node in row["nodes"]}
                if cells and all(row["state"] == "ready" for row in cells) and not members & harmed.nodes:
                    return time.monotonic() - began
            time.sleep(POLL_S)
        return inf

    def _whole_again(self) -> list[str]:
        try:
            self._until_whole()
        except NoLaboratory as error:
            return [str(error)]
        return []

    def _until_whole(self) -> None:
        """Every host of a region is a node or an ingress that is heard, and every cell is ready."""
        self.fleet.until(self._missing, WHOLE_WITHIN_S, "the fleet is not whole")

    def _missing(self) -> str:
        nodes = [row for row in self.fleet.rows("nodes") if row["state"] == "ready" and row["connected"]]
        wanted = sum(host.role is Role.NODE for host in self.topology.hosts.values())
        if len(nodes) < wanted:
            return f"{len(nodes)} of {wanted} nodes are ready"
        waiting = [row["id"] for row in self.fleet.rows("cells") if row["state"] not in {"ready", "stopped"}]
        return f"{', '.join(waiting)} not ready" if waiting else ""

    # --- what is read ------------------------------------------------------------------------------------------------

    def _urls(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for each in self.forwards:
            if not each.by_loopback:
                region = self.topology.host(each.host).site
                found.setdefault(region, {})[each.host] = f"http://127.0.0.1:{each.here}"
        return found

    def _hosts(self) -> dict[str, str]:
        names = {str(host.address): name for name, host in self.topology.hosts.items()}
        return {row["node"]: names[row["address"]] for row in self.fleet.rows("machines") if row["address"] in names}

    def _last_event(self) -> int:
        newest = self.fleet.ask("GET", "events/?page_size=1")["results"]
        return max((int(row["id"]) for row in newest), default=0)

    def _events(self, since: int) -> list[Row]:
        rows: list[Row] = self.fleet.ask("GET", f"events/?page_size=500&since_id={since}")["results"]
        return rows
