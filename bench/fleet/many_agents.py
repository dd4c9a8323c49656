"""Report age, CPU time and return after `kill -9` of web with thousands of agents.

    .venv/bin/python -m bench many_agents --agents 1000 --seconds 60 --storms 2

Starts its own servers, control plane and agents; needs no fleet. Agents hold real WebSockets over TLS.
"""

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import structs

from bench import cpu_s, family
from bench.fleet.own_control_plane import Authorities, ControlPlane, database, seed, start_agents
from bench.fleet.simulated_agents import AgentGroup, GroupStatus, Member

LOOK_EVERY_S = 1.0
AGES_EVERY = 5
"""A sample of all reports takes PostgreSQL about 3 µs for each, so only each fifth sample has it."""
CONTROL_PLANE = ("web", "controller", "servers")
"""Whose CPU time per agent has a goal. `agents` are the simulated ones, which real fleets run elsewhere."""
_AGES = """
SELECT count(*), avg(age), percentile_disc(0.99) WITHIN GROUP (ORDER BY age), max(age) FROM (
    SELECT extract(epoch FROM clock_timestamp())::float8 - greatest(
        (telemetry->>'agent_rss_bytes')::float8 / 1e6,
        CASE WHEN NOT quiet THEN extract(epoch FROM until - interval '5 s')::float8 END
    ) AS age
    FROM fleet_nodereport JOIN fleet_agentlistener ON fleet_agentlistener.id = listener
    WHERE connected AND telemetry ? 'agent_rss_bytes'
) AS heard
"""
"""Since a node was last heard: its newest report, or the last time that its web process noted no silence."""
_REPORTED = """
SELECT count(*) FROM fleet_nodereport WHERE connected AND (telemetry->>'agent_rss_bytes')::float8 > %s
"""
_OUT_OF_ORDER = "SELECT state, count(*) FROM fleet_node WHERE state <> 'ready' GROUP BY state"


@dataclass
class Ages:
    """Seconds, from samples of all nodes since each was heard: mean and p99 of each sample, the longest, and ages of
    passes."""

    means: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    oldest: float = 0.0
    last_pass: dict[str, float] = field(default_factory=dict)
    longest_pass: dict[str, float] = field(default_factory=dict)
    suspects: int = 0
    lost: int = 0

    def __str__(self) -> str:
        if not self.means:
            return "no reports"
        passes = ", ".join(
            f"{loop} {age:.1f} s old at most, took {self.longest_pass[loop]:.2f} s"
            for loop, age in sorted(self.last_pass.items())
        )
        return (
            f"heard: mean age {statistics.mean(self.means):.2f} s, p99 {max(self.p99s):.2f} s, oldest "
            f"{self.oldest:.2f} s; suspect at worst {self.suspects}, lost {self.lost}\n  passes: {passes}"
        )


class Watch(threading.Thread):
    """Samples the database every second. `take` returns the samples since its last call."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ages = Ages()
        self._lock = threading.Lock()
        self._ends = threading.Event()

    def run(self) -> None:
        from django.db import connection

        number = 0
        while not self._ends.wait(LOOK_EVERY_S):
            self._sample_standing()
            if number % AGES_EVERY == 0:
                self._sample_ages()
            number += 1
        connection.close()

    def take(self) -> Ages:
        with self._lock:
            ages, self._ages = self._ages, Ages()
        return ages

    def stop(self) -> None:
        self._ends.set()
        self.join()

    def _sample_ages(self) -> None:
        ((count, mean, p99, oldest),) = rows(_AGES)
        if count:
            with self._lock:
                self._ages.means.append(mean)
                self._ages.p99s.append(p99)
                self._ages.oldest = max(self._ages.oldest, oldest)

    def _sample_standing(self) -> None:
        from kernel.loop_passes import control_standing

        states, loops = dict(rows(_OUT_OF_ORDER)), control_standing().loops
        with self._lock:
            seen = self._ages
            for loop in loops:
                seen.last_pass[loop.loop] = max(seen.last_pass.get(loop.loop, 0.0), loop.age_s)
                seen.longest_pass[loop.loop] = max(seen.longest_pass.get(loop.loop, 0.0), loop.took_s)
            seen.suspects = max(seen.suspects, states.get("suspect", 0))
            seen.lost = max(seen.lost, states.get("lost", 0))


def rows(statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)
        return list(cursor.fetchall())


def reported_since(at: float) -> int:
    ((count,),) = rows(_REPORTED, at * 1e6)
    return int(count)


class StatusReader(threading.Thread):
    def __init__(self, output: Any) -> None:
        super().__init__(daemon=True)
        self.newest = GroupStatus(began=0.0, at=0.0, agents=0, connected=0, tries=0, reasons={})
        self.began = 0.0
        self._output = output

    def run(self) -> None:
        for line in self._output:
            self.newest = msgspec.json.decode(line, type=GroupStatus)
            self.began = self.newest.began


PORT = 24280
SETTLED_AFTER_S = 10.0
BACK_WITHIN_S = 120.0
"""Twice the goal. A bench with three storms then ends within ten minutes even if agents do not come back."""
RESTART_AFTER_S = 1.0
"""About the time that a supervisor takes to restart a process."""


class Bench:
    def __init__(self, processes: int, plane: ControlPlane, servers_pid: int, group: AgentGroup) -> None:
        self.plane = plane
        self.agents = len(group.members)
        self.processes = [
            start_agents(
                structs.replace(
                    group,
                    server=plane.servers[number % len(plane.servers)],
                    home=f"{group.home}-{number}",
                    members=group.members[number::processes],
                    first_address=1 + number * len(group.members),
                )
            )
            for number in range(processes)
        ]
        self.readers = [StatusReader(process.stdout) for process in self.processes]
        self._servers_pid = servers_pid
        self.watch = Watch()
        for thread in (*self.readers, self.watch):
            thread.start()

    def connected(self, after: float) -> int:
        return sum(reader.newest.connected for reader in self.readers if reader.newest.at > after)

    @property
    def tries(self) -> int:
        return sum(reader.newest.tries for reader in self.readers)

    def wait_for_start(self) -> float:
        """Waits until every process has prepared its agents, about 1 ms for each. Returns the Unix time at which the
        first one began to connect them."""
        while not all(reader.began for reader in self.readers):
            if any(process.poll() is not None for process in self.processes):
                raise SystemExit("a process of agents has ended")
            time.sleep(0.1)
        return min(reader.began for reader in self.readers)

    def wait_for_all(self, since: float, within_s: float = BACK_WITHIN_S) -> tuple[float, float]:
        """Returns the seconds from `since` (Unix time) until all are connected, and until a later report of each is
        stored; `within_s` if that takes longer. Connections from before a kill do not count, because web answers by
        now."""
        connected_after, began = 0.0, time.time()
        while time.time() - since < within_s:
            if not connected_after and self.connected(began) == self.agents:
                connected_after = time.time() - since
            if connected_after and reported_since(since) == self.agents:
                return connected_after, time.time() - since
            time.sleep(0.25)
        reasons: dict[str, int] = {}
        for reader in self.readers:
            reasons |= reader.newest.reasons
        print(f"not all within {within_s:.0f} s: {self.connected(began)} connected, {reported_since(since)} reported")
        print(f"  {reasons}")
        return connected_after or within_s, within_s

    def measure(self, title: str, seconds: float) -> dict[str, float]:
        """Returns the CPU µs of an agent-second, by part."""
        self.watch.take()
        before, began = self._cpu_s(), time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began
        used = {name: (spent - before[name]) / took_s for name, spent in self._cpu_s().items()}
        per_agent = {name: 1e6 * share / self.agents for name, share in used.items()}
        shown = ", ".join(f"{name} {share:.3f} ({per_agent[name]:.0f})" for name, share in used.items())
        print(f"{title}: {self.watch.take()}\n  cores (CPU µs of an agent-second): {shown}", flush=True)
        return per_agent

    def storm(self) -> dict[str, float]:
        """Kills every web process. Returns seconds, attempts, nodes and CPU seconds until all were heard again."""
        self.watch.take()
        tries, before, since = self.tries, self._cpu_s(), time.time()
        self.plane.kill_webs()
        time.sleep(RESTART_AFTER_S)
        for port in self.plane.ports:
            self.plane.start_web(port)
        for port in self.plane.ports:
            self.plane.wait_for_web(port)
        up_after_s = time.time() - since
        connected_s, reported_s = self.wait_for_all(since)
        used = {name: spent - before[name] for name, spent in self._cpu_s().items() if not name.startswith("web")}
        webs = self._cpu_s()["web"]
        tries = self.tries - tries
        time.sleep(SETTLED_AFTER_S)
        ages = self.watch.take()
        print(
            f"storm: web answers after {up_after_s:.1f} s, all connected after {connected_s:.1f} s, all reported after "
            f"{reported_s:.1f} s, {tries} tries\n  {ages}\n  CPU s: web {webs:.1f}, "
            + ", ".join(f"{name} {spent:.1f}" for name, spent in used.items()),
            flush=True,
        )
        return {
            "web answers, s": up_after_s,
            "all connected, s": connected_s,
            "all reported, s": reported_s,
            "tries": tries,
            "nodes suspect at worst": ages.suspects,
            "nodes lost at worst": ages.lost,
            "web, CPU s": webs,
            **{f"{name}, CPU s": spent for name, spent in used.items()},
        }

    def stop(self) -> None:
        self.watch.stop()
        for process in self.processes:
            process.kill()
            process.wait()

    def memory(self) -> str:
        """Resident MiB by part. Servers are left out: each of their processes counts the memory that they share."""
        own = ((name, pids) for name, pids in self._pids().items() if name != "servers")
        used = {name: sum(each.memory_info().rss for pid in pids for each in family(pid)) for name, pids in own}
        return ", ".join(f"{name} {used_bytes / 2**20:.0f}" for name, used_bytes in used.items())

    def _cpu_s(self) -> dict[str, float]:
        return {name: sum(cpu_s(family(pid)) for pid in pids) for name, pids in self._pids().items()}

    def _pids(self) -> dict[str, list[int]]:
        """The first processes of each part."""
        plane = self.plane.processes
        return {
            "web": [process.pid for name, process in plane.items() if name.startswith("web")],
            **{name: [process.pid] for name, process in plane.items() if not name.startswith("web")},
            "servers": [self._servers_pid],
            "agents": [process.pid for process in self.processes],
        }


def main(parser: argparse.ArgumentParser) -> None:
    options = _arguments(parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with TemporaryDirectory(prefix="switchyard-agents-") as folder, database(Path(folder), options.port) as servers:
        began_s = time.monotonic()
        members, authorities = seed(options.agents, options.agents * 9 // 20, with_past=not options.no_past)
        print(f"{len(members)} nodes with their certificates after {time.monotonic() - began_s:.1f} s", flush=True)
        plane = ControlPlane(options.port, options.webs, Path(folder) / "control-plane.log")
        try:
            plane.start(only_web=options.only_web)
            with _connected_agents(plane, members, authorities, options, servers.pid) as bench:
                _run(bench, options)
        finally:
            plane.stop()


@contextmanager
def _connected_agents(
    plane: ControlPlane,
    members: list[Member],
    authorities: Authorities,
    options: argparse.Namespace,
    servers_pid: int,
) -> Iterator[Bench]:
    from fleet.deployments.services.large_demo import LOAD

    ramp_s = options.agents / options.ramp
    group = AgentGroup(
        server="",
        home=f"{os.environ['SWITCHYARD_HOME']}-agents",
        key=authorities.key,
        bundle=authorities.bundle,
        revoked=authorities.revoked,
        members=tuple(members),
        load=LOAD,
        ramp_s=ramp_s,
        busy=options.busy,
    )
    bench = Bench(max(options.processes, options.webs), plane, servers_pid, group)
    try:
        began = bench.wait_for_start()
        before = bench._cpu_s()
        connected_s, reported_s = bench.wait_for_all(began, ramp_s + BACK_WITHIN_S)
        print(
            f"{options.agents} agents, {options.webs} web, load average {os.getloadavg()[0]:.1f}: all connected after "
            f"{connected_s:.1f} s, reported after {reported_s:.1f} s, {bench.tries} tries",
            flush=True,
        )
        spent = {name: 1e6 * (used - before[name]) / options.agents for name, used in bench._cpu_s().items()}
        print(f"  CPU µs of an agent: {', '.join(f'{name} {each:.0f}' for name, each in spent.items())}", flush=True)
        yield bench
    finally:
        bench.stop()


def _run(bench: Bench, options: argparse.Namespace) -> None:
    time.sleep(SETTLED_AFTER_S)
    rounds = [bench.measure("steady", options.seconds) for _ in range(options.rounds)]
    print(f"CPU µs of an agent-second, median (least to greatest) of {len(rounds)} windows:")
    for name in rounds[0]:
        print(f"  {name}: {_spread([each[name] for each in rounds])}")
    together = [sum(each.get(name, 0.0) for name in CONTROL_PLANE) for each in rounds]
    print(f"  {', '.join(CONTROL_PLANE)} together: {_spread(together)}", flush=True)
    print(f"MiB: {bench.memory()}", flush=True)
    storms = [bench.storm() for _ in range(options.storms)]
    if storms:
        print(f"after `kill -9` of web, median (least to greatest) of {len(storms)} times:")
    for name in storms[0] if storms else ():
        print(f"  {name}: {_spread([each[name] for each in storms], digits=1)}", flush=True)


def _spread(values: list[float], digits: int = 0) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--agents", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long is measured")
    parser.add_argument("--rounds", type=int, default=1, help="how often that is measured")
    parser.add_argument("--storms", type=int, default=1, help="how often every web process is killed")
    parser.add_argument("--webs", type=int, default=1, help="web processes")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that simulate agents, at least one for each web"
    )
    parser.add_argument("--ramp", type=float, default=100.0, help="agents a second that begin")
    parser.add_argument("--busy", type=float, default=0.0, help="share of leaders whose load changes")
    parser.add_argument("--only-web", action="store_true", help="no controller and worker: what a connection costs")
    parser.add_argument("--no-past", action="store_true", help="no events and load of the past, to start sooner")
    parser.add_argument("--port", type=int, default=PORT, help="of the first web process")
    return parser.parse_args()
