"""How soon a two-node cell and vLLM's own `--nnodes` notice what happens to a member, busy and idle.

    docs/bench/executor_detection.py [--hang-s 5] [--skip-nnodes] [--write]

Each event gets a replica of its own, all on this machine. Prints Markdown; `--write` puts it beside this file. A time
is from the signal to the first answer of /health that is not 200; for a killed leader, to the end of the follower.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))

from executor_cell import ARGS, FIRST_PORT, PYTHON, ROOT, START_LIMIT_S, Engine, artifact, engine

GIVE_UP_S = 30.0
NEVER = f"not within {GIVE_UP_S:.0f} s"
LIBRARY_PORT = FIRST_PORT + 300


class Pair:
    """Two members, as this bench sees them: where health is asked, and whom to signal."""

    def __init__(self, url: str, leader: int, follower: int) -> None:
        self.url, self.leader, self.follower = url, leader, follower

    def status(self) -> int:
        """Of /health; 0: nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=1).status_code
        except httpx.TransportError:
            return 0

    def keep_busy(self) -> None:
        """Start a long answer and return once it has begun."""
        begun = threading.Event()

        def read() -> None:
            asked = {"model": "m", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            try:
                with httpx.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=120) as response:
                    for _ in response.iter_lines():
                        begun.set()
            except httpx.TransportError:
                begun.set()

        threading.Thread(target=read, daemon=True).start()
        begun.wait(60)


@contextmanager
def cell(hang_s: float) -> Iterator[Pair]:
    """A cell of ours."""
    with engine(6, 2, "--tensor-parallel-size", "2", SWITCHYARD_CELL_HANG_S=str(hang_s)) as started:
        yield _pair(started)


def _pair(started: Engine) -> Pair:
    return Pair(started.url, started.ranks[0].pid, started.ranks[1].pid)


@contextmanager
def own_nodes(hang_s: float) -> Iterator[Pair]:
    """vLLM's own two nodes."""
    folder, _ = artifact()
    serve = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
    nodes = []
    for rank in range(2):
        argv = [
            *(str(PYTHON), "-c", serve, "--model", str(folder), "--served-model-name", "m", *ARGS),
            *("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank)),
            *("--master-addr", "127.0.0.1", "--master-port", str(LIBRARY_PORT + 1)),
            *("--host", "127.0.0.1", "--port", str(LIBRARY_PORT), *(("--headless",) if rank else ())),
        ]
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_WAIT_POLICY": "passive",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": f"{hang_s:.0f}",
        }
        nodes.append(
            subprocess.Popen(
                argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        )
    pair = Pair(f"http://127.0.0.1:{LIBRARY_PORT}", nodes[0].pid, nodes[1].pid)
    deadline = time.monotonic() + START_LIMIT_S
    try:
        while pair.status() != 200:
            if time.monotonic() > deadline:
                sys.exit("vLLM's own nodes did not start")
            time.sleep(0.2)
        yield pair
    finally:
        for node in nodes:
            subprocess.run(["pkill", "-9", "-s", str(node.pid)], check=False)
            node.wait(30)


def noticed(pair: Pair, how: signal.Signals, busy: bool) -> str:
    """Seconds until /health is not 200, after every process of the follower was signalled."""
    if busy:
        pair.keep_busy()
    began = time.monotonic()
    subprocess.run(["pkill", f"-{how.value}", "-s", str(pair.follower)], check=False)
    while pair.status() == 200:
        if time.monotonic() - began > GIVE_UP_S:
            return NEVER
        time.sleep(0.02)
    return f"{time.monotonic() - began:.2f} s"


def freed(pair: Pair) -> str:
    """Seconds until no process of the follower lives, after every process of the leader was killed."""
    began = time.monotonic()
    subprocess.run(["pkill", "-9", "-s", str(pair.leader)], check=False)
    while _lives(pair.follower):
        if time.monotonic() - began > GIVE_UP_S:
            return NEVER
        time.sleep(0.02)
    return f"{time.monotonic() - began:.2f} s"


def _lives(session: int) -> bool:
    states = subprocess.run(["ps", "-o", "stat=", "-s", str(session)], capture_output=True, text=True, check=False)
    return any(not state.startswith("Z") for state in states.stdout.split())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hang-s", type=float, default=5.0)
    parser.add_argument("--skip-nnodes", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    makers = [cell] if options.skip_nnodes else [cell, own_nodes]
    rows = [
        ("follower SIGKILL, busy", lambda pair: noticed(pair, signal.SIGKILL, True)),
        ("follower SIGKILL, idle", lambda pair: noticed(pair, signal.SIGKILL, False)),
        (f"follower SIGSTOP, busy, limit {options.hang_s:g} s", lambda pair: noticed(pair, signal.SIGSTOP, True)),
        (f"follower SIGSTOP, idle, limit {options.hang_s:g} s", lambda pair: noticed(pair, signal.SIGSTOP, False)),
        ("leader SIGKILL: follower gone", freed),
    ]
    lines = [
        "# How soon a member's end is noticed\n",
        f"{time.strftime('%Y-%m-%d')}, SmolLM2-135M, tensor-parallel 2, both members on one machine.\n",
        "| event | cell" + (" |" if options.skip_nnodes else " | vLLM's --nnodes |"),
        "| --- | ---" + (" |" if options.skip_nnodes else " | --- |"),
    ]
    for name, measure in rows:
        found = []
        for maker in makers:
            with maker(options.hang_s) as pair:
                found.append(measure(pair))
        lines.append(f"| {name} | {' | '.join(found)} |")
        print(lines[-1], flush=True)
    result = "\n".join(lines) + "\n"
    print(result)
    if options.write:
        HERE.with_suffix(".md").write_text(result)


if __name__ == "__main__":
    main()
