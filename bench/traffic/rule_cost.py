"""CPU time of HAProxy's rules: what a short request and a chunk cost without one group of rules each.

The configuration of a table with one pool runs once as it is, and once for each group without it, in front of cells
that cost next to nothing, in rounds that alternate. The links are plain, and no other process of the path runs. A group
that is left out saves its rules and what they do; groups overlap, so the savings do not add up. `--peer` measures
routers from PyPI in the same rounds.

    .venv/bin/python -m bench rule_cost [--rounds 9] [--seconds 0.12] [--chunks] [--peer vllm-router]
"""

import argparse
import contextlib
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import RESULTS, note, table
from bench.fleet.idle import used_by
from bench.traffic.contenders import MODEL, PLACES, REGION
from bench.traffic.path_cost import peer_path, spread
from bench.traffic.proxies import FLOOD, FLOOD_STREAMS, WHOLE, wire_ask, wire_build, wire_cells
from engine_agent.ingress import config
from engine_agent.ingress.desired import DesiredHaproxy, desired_from
from engine_agent.ingress.haproxy import find_binary
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.ingress_messages import CellEndpoint, Pool, RoutingTable

BASE_PORT = 29000
CELLS = 2
ENTRANCE, AGAIN, SECOND, POOL = "frontend ingress", "backend again", "frontend parsed", "backend pool."
RULES = r"^  (http-|acl|use_backend)"
COPY = (r"disable-l7-retry.*", "disable-l7-retry")


@dataclass(frozen=True)
class Cut:
    """Lines of a section to leave out, or to replace by `by`."""

    section: str
    pattern: str
    by: str | None = None


GROUPS = {
    "second pass": (Cut(ENTRANCE, "use_backend again"),),
    "second pass, with the copy that it saves the pool": (Cut(ENTRANCE, "use_backend again"), Cut(POOL, *COPY)),
    "first pass's copy of the request": (Cut(AGAIN, *COPY),),
    "rules of second pass and pool": (
        Cut(SECOND, RULES),
        Cut(SECOND, "^  no log", f"  no log\n  default_backend pool.{MODEL}"),
        Cut(POOL, RULES),
    ),
    "headers of the answer": (Cut(POOL, "http-response set-header X-Switchyard"),),
    "access log and its variables": (
        Cut(ENTRANCE, r"^  log(-format| stdout)|no option dontlog|http-response set-var|txn\.(log_|arrived)"),
        Cut(SECOND, "Trail"),
        Cut(AGAIN, "Trail|log_class"),
    ),
    "checks of headers, their removal": (
        Cut(ENTRANCE, "is_doubled|del-header|refuse_|is_large|32768|set-uri|Content-Type"),
    ),
    "check of the body's shape": (Cut(ENTRANCE, "check_shape"),),
    "search for the model in the body": (
        Cut(ENTRANCE, r"set-var\(txn\.model\) .*", f"set-var(txn.model) str({MODEL})"),
    ),
    "id of the request": (Cut(ENTRANCE, r"set-header X-Request-Id %\[uuid"),),
}
BARE = """\
global
  nbthread {threads}
  tune.bufsize 49152
defaults
  mode http
  option http-no-delay
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  http-reuse always
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  server s 127.0.0.1:{cell}
"""


@dataclass(frozen=True)
class Running:
    name: str
    port: int
    pids: tuple[int, ...]

    @property
    def cpu_s(self) -> float:
        """Raises RuntimeError if a process has ended."""
        used = [used_by(pid) for pid in self.pids]
        if None in used:
            raise RuntimeError(f"{self.name} has ended; see its log in .cache/bench/runs")
        return sum(one.cpu_s for one in used if one is not None)


def without(text: str, cuts: tuple[Cut, ...]) -> str:
    """The configuration without these lines. Raises ValueError if a cut finds none: the configuration has changed."""
    sections = re.split(r"\n(?=(?:global|defaults|frontend|backend|peers)\b)", text)
    for cut in cuts:
        found = 0
        for index, section in enumerate(sections):
            if section.startswith(cut.section):
                lines = section.split("\n")
                hits = [line for line in lines if re.search(cut.pattern, line)]
                found += len(hits)
                kept = [line if line not in hits else cut.by and re.sub(cut.pattern, cut.by, line) for line in lines]
                sections[index] = "\n".join(line for line in kept if line)
        if not found:
            raise ValueError(f"no line of `{cut.section}` matches {cut.pattern}")
    return "\n".join(sections)


def rendered(port: int, folder: Path, threads: int) -> tuple[str, DesiredHaproxy]:
    cells = tuple(CellEndpoint(f"c-{n}", 1, "127.0.0.1", BASE_PORT + n, PLACES) for n in range(CELLS))
    desired = desired_from(RoutingTable(1, REGION, (Pool(MODEL, (MODEL,), "realtime", cells, (), {REGION: 1.0}),)))
    settings = IngressSettings(
        "i-bench",
        REGION,
        folder,
        port=port,
        threads=threads,
        max_connections=2000,
        control_plane=("http://127.0.0.1:1",),
    )
    return config.render(desired, settings), desired


@contextlib.contextmanager
def haproxy(name: str, port: int, threads: int, cuts: tuple[Cut, ...] | None) -> Iterator[Running]:
    """`cuts` None: without any rule."""
    folder = RESULTS / "runs" / "rules" / str(port)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / config.RELAY_SOCKETS).mkdir(parents=True)
    text, desired = rendered(port, folder, threads)
    bare = BARE.format(threads=threads, port=port, cell=BASE_PORT)
    (folder / config.CONFIG_FILE).write_text(bare if cuts is None else without(text, cuts), encoding="utf-8")
    for script in config.SCRIPTS:
        shutil.copy(Path(config.__file__).with_name(script), folder / script)
    for file, entries in desired.maps.items():
        (folder / file).write_text(config.map_file(entries), encoding="utf-8")
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen(
            (find_binary(), "-db", "-f", config.CONFIG_FILE), cwd=folder, stdout=subprocess.PIPE, stderr=log
        )
    reader = subprocess.Popen(("cat",), stdin=process.stdout, stdout=subprocess.DEVNULL)
    try:
        yield Running(name, port, (process.pid,))
    finally:
        process.kill()
        process.wait()
        reader.wait()


@contextlib.contextmanager
def router(name: str, port: int) -> Iterator[Running]:
    with peer_path(name, port, (BASE_PORT, BASE_PORT + 1)) as path:
        yield Running(name, port, tuple(each.pid for each in path.parts()[name]))


def measure(program: Path, running: Running, body: dict[str, Any], unit: str, seconds: float) -> dict[str, Any]:
    before = running.cpu_s
    seen = wire_ask(program, "closed", running.port, FLOOD_STREAMS if unit == "events" else 64, seconds, body)
    if seen.errors:
        raise RuntimeError(f"{running.name}: {seen.complaint}; see its log in .cache/bench/runs")
    units = max(1, getattr(seen, unit))
    us = 1e6 * (running.cpu_s - before) / units
    return {"rules": running.name, "unit": unit, "us": us, "per_s": units / seen.seconds}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.12, help="of one measurement")
    parser.add_argument("--threads", type=int, default=2, help="of HAProxy")
    parser.add_argument("--chunks", action="store_true", help="chunks of streams instead of short requests")
    parser.add_argument("--peer", nargs="*", default=[], help="routers from PyPI to measure in the same run")
    options = parser.parse_args()
    program = wire_build(RESULTS)
    body, unit = (FLOOD, "events") if options.chunks else (WHOLE, "requests")
    variants: dict[str, tuple[Cut, ...] | None] = {"all rules": ()} | GROUPS | {"no rules, one pass": None}
    rows = []
    with ExitStack() as stack:
        stack.enter_context(wire_cells(program, BASE_PORT, CELLS))
        all_running = [
            stack.enter_context(haproxy(name, BASE_PORT + 10 + number, options.threads, cuts))
            for number, (name, cuts) in enumerate(variants.items())
        ]
        first = BASE_PORT + 10 + len(variants)
        all_running += [stack.enter_context(router(name, first + number)) for number, name in enumerate(options.peer)]
        time.sleep(2)  # until all have checked the cells
        for running in all_running:
            measure(program, running, body, unit, options.seconds)
        for turn in range(options.rounds):
            for running in all_running[turn % len(all_running) :] + all_running[: turn % len(all_running)]:
                row = measure(program, running, body, unit, options.seconds)
                rows.append(row)
                note("rule_cost", row)
                time.sleep(0.1)
    of = {name: [row for row in rows if row["rules"] == name] for name in (*variants, *options.peer)}
    us = {name: [row["us"] for row in found] for name, found in of.items()}
    whole = statistics.median(us["all rules"])
    lines = [
        [
            name,
            spread(us[name], 1),
            "-" if name in options.peer else f"{whole - statistics.median(us[name]):.1f}",
            spread([row["per_s"] for row in found], 0),
        ]
        for name, found in of.items()
    ]
    print(table(["without", f"µs of a {unit.removesuffix('s')}", "saves", "per second"], lines))
