"""CPU time and speed of the request path by part: µs for each short request, and for each chunk of a stream.

The whole path (HAProxy, cell proxies, TLS between them) runs before cells that cost next to nothing. CPU time is exact
(`schedstat`, of every thread) and the load is fixed, so other work on the machine changes the figures less than it
changes requests/s. `--beside` runs the paths of other checkouts in turns with this one.

`--python` runs cell proxies with other interpreters in turns, which need the packages of
`engine_agent/requirements.txt`.

`--speeds` measures requests/s, chunks/s and the added time to the first token instead, on a machine without other work,
with TLS inside and without, and the CPU time of the same requests.

    .venv/bin/python -m bench path_cost [--rounds 5] [--beside FOLDER …] [--python python3.14 …] [--peer vllm-router]
    .venv/bin/python -m bench path_cost --speeds --rounds 7 --peer vllm-router smg
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import RESULTS, ROOT, family, note, table
from bench.fleet.idle import used_by
from bench.traffic import contenders, proxies
from bench.traffic.proxies import PROMPT, WHOLE, BenchFleet, wire_ask, wire_build, wire_cells

BASE_PORT = 28000
PORTS_EACH = 50
STREAM: dict[str, Any] = {**PROMPT, "stream": True, "max_tokens": 100, "seed": 10_000}
"""100 chunks, 10 ms apart. The price of a chunk has a hundredth of that of its request."""
FLOOD: dict[str, Any] = {**STREAM, "seed": 2_000}


@dataclass(frozen=True)
class Load:
    """`how`: `rate` with `count` a second, or `closed` with `count` connections. `share` of the seconds of a round."""

    name: str
    how: str
    count: int
    body: dict[str, Any]
    unit: str
    share: float = 1.0


LOADS = (
    Load("request, 400/s", "rate", 400, WHOLE, "requests"),
    Load("chunk, 2,000/s", "rate", 20, STREAM, "events"),
    Load("request, 64 together", "closed", 64, WHOLE, "requests", 0.25),
    Load("chunk, 64 streams together", "closed", 64, FLOOD, "events", 0.5),
)
"""At a fixed rate most wake-ups find one request or chunk, and cold caches. With many together they find several."""
REQUESTS_PER_S = Load("requests/s, 64 together", "closed", 64, WHOLE, "requests", 0.75)
CHUNKS_PER_S = Load("chunks/s, 128 streams", "closed", proxies.FLOOD_STREAMS, proxies.FLOOD, "events", 0.75)
FIRST_TOKEN = Load("streams of 16, 300/s", "rate", 300, proxies.STREAM, "requests")
SPEEDS = (REQUESTS_PER_S, CHUNKS_PER_S, FIRST_TOKEN)
"""As `bench proxies`: all that the path can do, and the time to the first token while it is not busy."""
DIRECT = "direct"


@dataclass(frozen=True)
class RunningPath:
    """A path that answers on `port`. `parts`: its processes by name."""

    name: str
    port: int
    parts: Callable[[], dict[str, list[psutil.Process]]]


@contextmanager
def whole_path(
    name: str, root: Path, port: int, fleet: BenchFleet | None, python: str = sys.executable
) -> Iterator[RunningPath]:
    """An ingress and one cell proxy of the checkout in `root`; `fleet` None: plain links. `python` runs the proxy."""
    folder = RESULTS / "runs" / f"path-{name.replace(', ', '-')}"
    certify = (fleet.certify_node, fleet.certify_ingress) if fleet else (None, None)
    with ExitStack() as stack:
        before = contenders.CHECKOUT.set(root)
        running = contenders.cell_proxy(folder, 0, port + 10, BASE_PORT, certify[0], python=python)
        end, proxy = stack.enter_context(running)
        agent = stack.enter_context(contenders.ingress(folder / "ingress", port, [end], certify=certify[1]))
        contenders.CHECKOUT.reset(before)
        contenders.wait_until_it_answers(port)

        def parts() -> dict[str, list[psutil.Process]]:
            return {"cell proxy": [proxy], "HAProxy": family(agent.pid)[1:], "ingress agent": [agent]}

        yield RunningPath(name, port, parts)


@contextmanager
def peer_path(name: str, port: int, cells: Sequence[int] = (BASE_PORT, BASE_PORT)) -> Iterator[RunningPath]:
    peer = next(each for each in contenders.PEERS if each.name == name)
    programs = contenders.install(peer, RESULTS)
    with contenders.peer_process(peer, programs, RESULTS / "runs", port, cells) as process:
        contenders.wait_until_it_answers(port, process=process)
        yield RunningPath(name, port, lambda: {name: family(process.pid)})


def used_s(path: RunningPath) -> dict[str, float]:
    return {
        name: sum(used.cpu_s for each in processes if (used := used_by(each.pid)) is not None)
        for name, processes in path.parts().items()
    }


def measure(program: Path, path: RunningPath, loads: Sequence[Load], seconds: float) -> list[dict[str, Any]]:
    rows = []
    for load in loads:
        before = used_s(path)
        seen = wire_ask(program, load.how, path.port, load.count, seconds * load.share, load.body)
        units = getattr(seen, load.unit)
        us = {name: 1e6 * (now - before[name]) / max(1, units) for name, now in used_s(path).items()}
        row = {"path": path.name, "load": load.name, "units": units, "errors": seen.errors, "us": us}
        row["per_s"] = units / seen.seconds
        row["first_ms"] = statistics.median(seen.first_us) / 1000 if seen.first_us else 0.0
        rows.append(row)
        time.sleep(0.2)
    return rows


def spread(found: Sequence[float], digits: int) -> str:
    return f"{statistics.median(found):,.{digits}f} ({min(found):,.{digits}f} to {max(found):,.{digits}f})"


def report(rows: list[dict[str, Any]], loads: Sequence[Load]) -> str:
    """Medians of the rounds in µs, with the least and the greatest; one line for each path and part."""
    lines = []
    for name in dict.fromkeys(row["path"] for row in rows if row["us"]):
        own = [row for row in rows if row["path"] == name]
        parts = list(own[0]["us"])
        for part in (*parts, *(["all"] if len(parts) > 1 else [])):
            cells = []
            for load in loads:
                found = [
                    sum(row["us"].values()) if part == "all" else row["us"][part]
                    for row in own
                    if row["load"] == load.name
                ]
                cells.append(spread(found, 1))
            lines.append([f"{name}: {part}", *cells, str(sum(row["errors"] for row in own))])
    return table(["µs of CPU time for each", *(f"{load.name} ({load.unit})" for load in loads), "errors"], lines)


def speeds_report(rows: list[dict[str, Any]]) -> str:
    """What each path reaches; its time to the first token less that of the cells alone in the same round."""

    def of(path: str, load: Load, value: str) -> list[float]:
        return [row[value] for row in rows if row["path"] == path and row["load"] == load.name]

    lines = []
    alone = of(DIRECT, FIRST_TOKEN, "first_ms")
    for name in dict.fromkeys(row["path"] for row in rows):
        added = [seen - least for seen, least in zip(of(name, FIRST_TOKEN, "first_ms"), alone, strict=True)]
        speeds = [spread(of(name, load, "per_s"), 0) for load in (REQUESTS_PER_S, CHUNKS_PER_S)]
        lines.append([name, *speeds, "-" if name == DIRECT else spread(added, 2)])
    return table(["path", REQUESTS_PER_S.name, CHUNKS_PER_S.name, "added TTFT p50 ms, 300 streams/s"], lines)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the longest measurement of a round")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts, whose paths run in turns")
    parser.add_argument("--python", nargs="*", default=[], help="other interpreters for cell proxies, in turns")
    parser.add_argument("--plain", action="store_true", help="without TLS between ingress and cell proxy")
    parser.add_argument("--speeds", action="store_true", help="requests/s, chunks/s and added time to the first token")
    parser.add_argument("--peer", nargs="*", default=[], help="routers from PyPI to measure in the same run")
    options = parser.parse_args()
    loads = SPEEDS if options.speeds else LOADS
    program = wire_build(RESULTS)
    roots = {"this": ROOT} | {each.name: each.resolve() for each in options.beside}
    links = {"": None if options.plain else BenchFleet()} | ({", plain": None} if options.speeds else {})
    own = sys.executable
    ours = [(f"{name}{suffix}", root, fleet, own) for name, root in roots.items() for suffix, fleet in links.items()]
    ours += [(Path(each).name, ROOT, links[""], each) for each in options.python]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(wire_cells(program, BASE_PORT, 1))
        paths = [RunningPath(DIRECT, BASE_PORT, dict)] if options.speeds else []
        paths += [
            stack.enter_context(whole_path(name, root, BASE_PORT + PORTS_EACH * number, fleet, python))
            for number, (name, root, fleet, python) in enumerate(ours, 1)
        ]
        paths += [
            stack.enter_context(peer_path(name, BASE_PORT + PORTS_EACH * (len(ours) + 2 * number)))
            for number, name in enumerate(options.peer, 1)
        ]
        for path in paths:  # connections and handshakes of the first requests count in no round
            measure(program, path, loads, 0.5)
        for turn in range(options.rounds):
            for path in paths[turn % len(paths) :] + paths[: turn % len(paths)]:
                for row in measure(program, path, loads, options.seconds):
                    row |= {"at": time.time(), "load_average": os.getloadavg()[0]}
                    rows.append(row)
                    note("path_cost", row)
    print(report(rows, loads))
    if options.speeds:
        print(speeds_report(rows))
