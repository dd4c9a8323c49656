"""A two-node cell under mixed load for half an hour: no call out of step, the same tokens at the end, flat memory.

    bench/executor_soak.py [--minutes 30] [--clients 4] [--pause-s 0.2] [--write]

Clients ask at random for short and long answers, streamed or whole, and hang up on some of them. Each minute a fixed
prompt is sent whose greedy answer must not change, and the resident memory of every process is read. Prints
Markdown; `--write` puts it beside this file.
"""

import argparse
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

from executor_cell import Engine, engine

TEXT = "The railway reached the valley in the spring, and with it came letters, coal, and people from the north. "
PROBE = "The capital of France is"
SETTLED_MINUTES = 5
"""Until caches and allocators have what they need."""


@dataclass
class Soak:
    """What clients and the clock saw."""

    stop: threading.Event = field(default_factory=threading.Event)
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


def client(of: Engine, seed: int, pause_s: float, soak: Soak) -> None:
    """Send requests until `soak.stop`. Failures are counted by their error."""
    draw = random.Random(seed)
    with httpx.Client(timeout=300) as http:
        while not soak.stop.wait(draw.expovariate(1 / pause_s)):
            body = {
                "model": "m",
                "prompt": (TEXT * 8)[: draw.choice((10, 60, 300, 800))],
                "max_tokens": draw.choice((1, 8, 32, 128)),
                "temperature": draw.choice((0.0, 1.0)),
                "stream": draw.random() < 0.7,
            }
            try:
                soak.ended[_send(http, of.url, body, soak, hangs_up=draw.random() < 0.1)] += 1
            except httpx.HTTPError as error:
                soak.ended[f"failed: {type(error).__name__}"] += 1


def _send(http: httpx.Client, url: str, body: dict[str, object], soak: Soak, *, hangs_up: bool) -> str:
    with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        for count, line in enumerate(answer.iter_lines()):
            if '"error"' in line:
                return f"failed: {line[:80]}"
            soak.tokens += line.startswith("data: {")
            if hangs_up and count > 6:
                return "hung up"
    return "answered" if answer.status_code == 200 else f"failed: {answer.status_code}"


def memory_mib(of: Engine) -> float:
    """Resident memory of all processes of all ranks, pages that they share counted once (PSS)."""
    total = 0
    for rank in of.ranks:
        root = psutil.Process(rank.pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_full_info().pss
    return total / 2**20


def run_soak(minutes: int, clients: int, pause_s: float) -> tuple[Soak, list[float], int]:
    """What the clients saw, the memory after each minute in MiB, and how often the greedy answer changed."""
    soak, memory, changed = Soak(), list[float](), 0
    with engine(8, 2, "--tensor-parallel-size", "2", "--dtype", "float32", SWITCHYARD_CELL_HANG_S="120") as cell:
        expected = cell.complete(PROBE, 16)["text"]
        threads = [threading.Thread(target=client, args=(cell, seed, pause_s, soak)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        for minute in range(minutes):
            time.sleep(60)
            memory.append(memory_mib(cell))
            changed += cell.complete(PROBE, 16)["text"] != expected
            print(f"{minute + 1} min, {memory[-1]:.0f} MiB, {dict(soak.ended)}", flush=True)
        soak.stop.set()
        for thread in threads:
            thread.join()
    return soak, memory, changed


def report(options: argparse.Namespace, soak: Soak, memory: list[float], changed: int) -> str:
    """As Markdown."""
    settled = memory[min(SETTLED_MINUTES, len(memory) - 1) :]
    failed = sum(count for how, count in soak.ended.items() if how.startswith("failed"))
    return (
        f"# Half an hour of mixed load on a two-node cell\n\n"
        f"{time.strftime('%Y-%m-%d')}, SmolLM2-135M, fp32, tensor-parallel 2, {options.clients} clients that pause "
        f"{options.pause_s:g} s, {options.minutes} minutes.\n\n"
        "| what | measured |\n| --- | --- |\n"
        f"| answers, and clients that hung up | {soak.ended['answered']}, {soak.ended['hung up']} |\n"
        f"| failed | {failed} |\n"
        f"| tokens streamed | {soak.tokens} |\n"
        f"| greedy answers of the probe that changed | {changed} of {options.minutes} |\n"
        f"| memory after {min(SETTLED_MINUTES, len(memory))} minutes, at the end, most | "
        f"{settled[0]:.0f}, {settled[-1]:.0f}, {max(settled):.0f} MiB |\n"
    )


def main() -> None:
    """Soak and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause-s", type=float, default=0.2, help="between two requests of a client, on average")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    soak, memory, changed = run_soak(options.minutes, options.clients, options.pause_s)
    result = report(options, soak, memory, changed)
    print(result)
    if options.write:
        (HERE.parents[1] / "docs" / "bench" / f"{HERE.stem}.md").write_text(result)


if __name__ == "__main__":
    main()
