"""Wall time and CPU time of `make up`, from an empty home and from one with state.

    .venv/bin/python -m bench start [--engine sim|llama-cpp|vllm] [--rounds 3]

Each round starts a fleet in a new home, stops it, and starts it again. The fleet has its own ports. The time is that of
the command until every cell is ready. The CPU seconds are those of all its processes by then; compare these
on a busy machine."""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import CACHE, ROOT, cpu_s, table
from controlplane.embedded.process_ownership import processes_of

START_LIMIT_S = 900
_STEP = re.compile(r"\| (.+): done in ([\d.]+) s")


def start(environment: dict[str, str], home: Path) -> dict[str, float]:
    """Run `make up` and return the seconds of its steps, of the whole, and of the CPU."""
    began = time.monotonic()
    said = _embedded(environment, "up", "--detach")
    wall_s = time.monotonic() - began
    steps = {name: float(seconds) for name, seconds in _STEP.findall(said)}
    return steps | {"every cell ready": wall_s, "CPU": cpu_s(processes_of(home))}


def _embedded(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "controlplane.embedded", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def one_round(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        home = Path(folder).resolve() / "home"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
            "ENGINE": options.engine,
            "SWITCHYARD_HOME": str(home),
            "SWITCHYARD_CACHE": str(CACHE),
            "SWITCHYARD_PORT": str(options.port),
            "SWITCHYARD_AGENT_PORT": str(options.port + 1),
            "SWITCHYARD_INGRESS_PORT": str(options.port + 2),
            "SWITCHYARD_NODE_PORTS": str(options.port + 100),
        }
        try:
            first = start(environment, home)
            _embedded(environment, "down")
            return first, start(environment, home)
        finally:
            _embedded(environment, "down")


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("sim", "llama-cpp", "vllm"), default="sim")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=26000, help="the first of 500 free ports")
    options = parser.parse_args()
    rounds = [one_round(options) for _ in range(options.rounds)]
    names = list(rounds[0][0])
    rows = [
        [name, *(f"{statistics.median(each[warm].get(name, 0.0) for each in rounds):.1f}" for warm in (0, 1))]
        for name in names
    ]
    print(table([f"seconds, ENGINE={options.engine}", "empty home", "with state"], rows))
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"\nload average {load}; medians of {options.rounds} rounds")
