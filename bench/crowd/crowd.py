"""Report age, CPU time and return after `kill -9` of web with thousands of agents.

    .venv/bin/python -m bench crowd --agents 1000 --seconds 60 --storms 2

Brings its own servers, control plane and agents; needs no fleet. Agents hold real WebSockets with the agents' own code.
`--plain` has them come without TLS. `--knocks 2000` adds so many strangers a second with credentials that nobody
issued.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import structs

from bench.crowd.agents import Crowd, Member
from bench.crowd.control_plane import ControlPlane, bundle, cpu_s, database, run_crowd, seed, shares
from bench.crowd.figures import CrowdStanding, Watch, reported_since
from bench.crowd.knocks import knocking

PORT = 24280
SETTLED_AFTER_S = 10.0
BACK_WITHIN_S = 300.0
RESTART_AFTER_S = 1.0
"""After a kill: about when a supervisor starts it again."""


class Bench:
    """One control plane with its crowd, once all agents are there."""

    def __init__(self, processes: int, plane: ControlPlane, servers_pid: int, crowd: Crowd) -> None:
        self.plane = plane
        self.agents = len(crowd.members)
        self.processes = [
            run_crowd(structs.replace(crowd, members=share)) for share in shares(list(crowd.members), processes)
        ]
        self.standings = [CrowdStanding(process.stdout) for process in self.processes]
        self._servers_pid = servers_pid
        self.watch = Watch()
        for thread in (*self.standings, self.watch):
            thread.start()

    def connected(self, after: float) -> int:
        """How many agents are connected, by standings that were written after this second since 1970."""
        return sum(standing.newest.connected for standing in self.standings if standing.newest.at > after)

    @property
    def tries(self) -> int:
        return sum(standing.newest.tries for standing in self.standings)

    def wait_for_all(self, since: float) -> tuple[float, float]:
        """Seconds from `since` (1970) until all are connected, and until a report that is younger is stored of each.
        What was connected before a kill does not count: web answers by now."""
        connected_after, began = 0.0, time.time()
        while time.time() - since < BACK_WITHIN_S:
            if not connected_after and self.connected(began) == self.agents:
                connected_after = time.time() - since
            if connected_after and reported_since(since) == self.agents:
                return connected_after, time.time() - since
            time.sleep(0.25)
        reasons: dict[str, int] = {}
        for standing in self.standings:
            reasons |= standing.newest.reasons
        print(
            f"not all within {BACK_WITHIN_S:.0f} s: {self.connected(began)} connected, {reported_since(since)} reported"
        )
        print(f"  {reasons}")
        return connected_after or BACK_WITHIN_S, BACK_WITHIN_S

    def measure(self, title: str, seconds: float) -> None:
        """Age of reports and processor time for a while."""
        self.watch.take()
        before, began = self._cpu_s(), time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began
        used = {name: (spent - before[name]) / took_s for name, spent in self._cpu_s().items()}
        shown = ", ".join(f"{name} {share:.2f}" for name, share in used.items())
        print(f"{title}: {self.watch.take()}\n  cores: {shown}", flush=True)

    def storm(self) -> None:
        """Kill every web process, start it again, and wait for all agents."""
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
        time.sleep(SETTLED_AFTER_S)
        print(
            f"storm: web answers after {up_after_s:.1f} s, all connected after {connected_s:.1f} s, all reported after "
            f"{reported_s:.1f} s, {self.tries - tries} tries\n  {self.watch.take()}\n  CPU s: web {webs:.1f}, "
            + ", ".join(f"{name} {spent:.1f}" for name, spent in used.items()),
            flush=True,
        )

    def stop(self) -> None:
        self.watch.stop()
        for process in self.processes:
            process.kill()
            process.wait()

    def _cpu_s(self) -> dict[str, float]:
        processes = self.plane.processes
        webs = cpu_s({name: process.pid for name, process in processes.items() if name.startswith("web")})
        others = {name: process.pid for name, process in processes.items() if not name.startswith("web")}
        rig = cpu_s({f"rig-{number}": process.pid for number, process in enumerate(self.processes)})
        rest = cpu_s({**others, "servers": self._servers_pid})
        return {"web": sum(webs.values()), **rest, "rig": sum(rig.values())}


def main(parser: argparse.ArgumentParser) -> None:
    options = _arguments(parser)
    if options.plain:
        os.environ["SWITCHYARD_PLAIN_LINKS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with TemporaryDirectory(prefix="switchyard-crowd-") as folder, database(Path(folder), options.port) as servers:
        members = seed(options.agents, options.agents * 9 // 20)
        plane = ControlPlane(options.port, options.webs, Path(folder) / "control-plane.log")
        try:
            plane.start()
            with _crowd(plane, members, options, servers.pid) as bench:
                _run(bench, options)
        finally:
            plane.stop()
            if options.log:
                Path(options.log).write_bytes((Path(folder) / "control-plane.log").read_bytes())


@contextmanager
def _crowd(
    plane: ControlPlane, members: list[Member], options: argparse.Namespace, servers_pid: int
) -> Iterator[Bench]:
    from fleet.services.load_test_seed import LOAD

    began = time.time()
    homes = f"{os.environ['SWITCHYARD_HOME']}-agents"
    crowd = Crowd(plane.servers, homes, bundle(), tuple(members), LOAD, ramp_s=options.agents / options.ramp)
    bench = Bench(options.processes, plane, servers_pid, crowd)
    try:
        connected_s, reported_s = bench.wait_for_all(began)
        print(
            f"{options.agents} agents, {options.webs} web, load average {os.getloadavg()[0]:.1f}: all connected after "
            f"{connected_s:.1f} s, reported after {reported_s:.1f} s, {bench.tries} tries",
            flush=True,
        )
        yield bench
    finally:
        bench.stop()


def _run(bench: Bench, options: argparse.Namespace) -> None:
    time.sleep(SETTLED_AFTER_S)
    bench.measure("steady", options.seconds)
    with ExitStack() as stack:
        if options.knocks:
            answers = stack.enter_context(knocking(bench.plane.servers[0], options.knocks))
            stack.callback(lambda: print(f"knocks: {answers}", flush=True))
            bench.measure(f"{options.knocks} knocks/s", options.seconds)
        for _ in range(options.storms):
            bench.storm()


def _arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--agents", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long is measured")
    parser.add_argument("--storms", type=int, default=1, help="how often every web process is killed")
    parser.add_argument("--knocks", type=int, default=0, help="bad credentials a second")
    parser.add_argument("--webs", type=int, default=1, help="web processes")
    parser.add_argument("--processes", type=int, default=1, help="processes that simulate agents")
    parser.add_argument("--ramp", type=float, default=100.0, help="agents a second that begin")
    parser.add_argument("--port", type=int, default=PORT, help="of the first web process")
    parser.add_argument("--plain", action="store_true", help="agents come without TLS, to compare")
    parser.add_argument("--log", help="where the control plane's log is kept")
    return parser.parse_args()
