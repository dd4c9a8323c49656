"""CPU time of the request path by part: µs for each short request, and for each chunk of a stream.

The whole path (HAProxy, cell proxies, TLS between them) runs before cells that cost next to nothing. CPU time is exact
(`schedstat`, of every thread) and the load is fixed, so other work on the machine changes the figures less than it
changes requests/s. `--beside` runs the paths of other checkouts in turns with this one.

    .venv/bin/python -m bench path_cost [--rounds 5] [--beside FOLDER …] [--peer vllm-router]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import RESULTS, ROOT, family, note, table
from bench.fleet.idle import used_by
from bench.traffic import contenders
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


@dataclass(frozen=True)
class RunningPath:
    """A path that answers on `port`. `parts`: its processes by name."""

    name: str
    port: int
    parts: Callable[[], dict[str, list[psutil.Process]]]


@contextmanager
def whole_path(name: str, root: Path, port: int, fleet: BenchFleet | None) -> Iterator[RunningPath]:
    """An ingress and one cell proxy of the checkout in `root`; `fleet` None: plain links."""
    folder = RESULTS / "runs" / f"path-{name}"
    certify = (fleet.certify_node, fleet.certify_ingress) if fleet else (None, None)
    with ExitStack() as stack:
        before = contenders.CHECKOUT.set(root)
        end, proxy = stack.enter_context(contenders.cell_proxy(folder, 0, port + 10, BASE_PORT, certify[0]))
        agent = stack.enter_context(contenders.ingress(folder / "ingress", port, [end], certify=certify[1]))
        contenders.CHECKOUT.reset(before)
        contenders.wait_until_it_answers(port)

        def parts() -> dict[str, list[psutil.Process]]:
            return {"cell proxy": [proxy], "HAProxy": family(agent.pid)[1:], "ingress agent": [agent]}

        yield RunningPath(name, port, parts)


@contextmanager
def peer_path(name: str, port: int) -> Iterator[RunningPath]:
    peer = next(each for each in contenders.PEERS if each.name == name)
    programs = contenders.install(peer, RESULTS)
    with contenders.peer_process(peer, programs, RESULTS / "runs", port, [BASE_PORT, BASE_PORT]) as process:
        contenders.wait_until_it_answers(port, process=process)
        yield RunningPath(name, port, lambda: {name: family(process.pid)})


def used_s(path: RunningPath) -> dict[str, float]:
    return {
        name: sum(used.cpu_s for each in processes if (used := used_by(each.pid)) is not None)
        for name, processes in path.parts().items()
    }


def measure(program: Path, path: RunningPath, seconds: float) -> list[dict[str, Any]]:
    rows = []
    for load in LOADS:
        before = used_s(path)
        seen = wire_ask(program, load.how, path.port, load.count, seconds * load.share, load.body)
        units = getattr(seen, load.unit)
        us = {name: 1e6 * (now - before[name]) / max(1, units) for name, now in used_s(path).items()}
        rows.append({"path": path.name, "load": load.name, "units": units, "errors": seen.errors, "us": us})
        time.sleep(0.2)
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """Medians of the rounds in µs, with the least and the greatest; one line for each path and part."""
    lines = []
    for name in dict.fromkeys(row["path"] for row in rows):
        own = [row for row in rows if row["path"] == name]
        parts = list(own[0]["us"])
        for part in (*parts, *(["all"] if len(parts) > 1 else [])):
            cells = []
            for load in LOADS:
                found = sorted(
                    sum(row["us"].values()) if part == "all" else row["us"][part]
                    for row in own
                    if row["load"] == load.name
                )
                cells.append(f"{statistics.median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})")
            lines.append([f"{name}: {part}", *cells, str(sum(row["errors"] for row in own))])
    return table(["µs of CPU time", *(load.name for load in LOADS), "errors"], lines)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the longest measurement of a round")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts, whose paths run in turns")
    parser.add_argument("--plain", action="store_true", help="without TLS between ingress and cell proxy")
    parser.add_argument("--peer", default="", help="a router from PyPI to measure in the same run")
    options = parser.parse_args()
    program = wire_build(RESULTS)
    fleet = None if options.plain else BenchFleet()
    roots = {"this": ROOT} | {each.name: each.resolve() for each in options.beside}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(wire_cells(program, BASE_PORT, 1))
        paths = [
            stack.enter_context(whole_path(name, root, BASE_PORT + PORTS_EACH * number, fleet))
            for number, (name, root) in enumerate(roots.items(), 1)
        ]
        if options.peer:
            paths.append(stack.enter_context(peer_path(options.peer, BASE_PORT + 9 * PORTS_EACH)))
        for path in paths:  # connections and handshakes of the first requests count in no round
            measure(program, path, 0.5)
        for turn in range(options.rounds):
            for path in paths[turn % len(paths) :] + paths[: turn % len(paths)]:
                for row in measure(program, path, options.seconds):
                    row |= {"at": time.time(), "load_average": os.getloadavg()[0]}
                    rows.append(row)
                    note("path_cost", row)
    print(report(rows))
