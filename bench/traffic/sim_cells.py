"""Real `sim` cells with their cell proxies, for the runs that confirm what the simulation says. It measures nothing."""

import contextlib
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from bench.traffic import contenders
from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.protocol.ingress_messages import CellEndpoint

PORTS_PER_CELL = 10


@dataclass(frozen=True)
class SimCell:
    """One cell: where its proxy takes requests, and where its engine counts them."""

    endpoint: CellEndpoint
    engine_port: int

    def metric(self, name: str) -> float:
        """A counter or gauge of vLLM's from the engine's page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.engine_port}/metrics", timeout=10) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f"vllm:{name}{{"):
                    return float(line.rpartition(" ")[2])
        raise KeyError(name)


@contextlib.contextmanager
def sim_cells(
    folder: Path, base: int, parameters: ModelParameters, slow_factors: Sequence[float], longest_tokens: int = 8192
) -> Iterator[list[SimCell]]:
    """A cell for each factor, so many times as slow as `parameters` say, all up and answering."""
    with ExitStack() as stack:
        cells = [
            stack.enter_context(
                _cell(folder, number, base + PORTS_PER_CELL * number, parameters, factor, longest_tokens)
            )
            for number, factor in enumerate(slow_factors)
        ]
        for cell in cells:
            contenders.wait_until_it_answers(cell.endpoint.port)
        yield cells


@contextlib.contextmanager
def _cell(
    folder: Path, number: int, base: int, parameters: ModelParameters, factor: float, longest_tokens: int
) -> Iterator[SimCell]:
    proxy, agent_check, admin, engine, engine_admin = range(base, base + 5)
    node = f"n-{number:08x}"
    name = ("--node-id", node, "--cell", f"c-{number}", "--generation", "1")
    model = [
        word
        for each in fields(parameters)
        for word in (f"--{each.name.replace('_', '-')}", str(getattr(parameters, each.name)))
    ]
    fault = ("--fault", json.dumps({"kind": "slow", "factor": factor})) if factor > 1 else ()
    engine_words = (
        *(
            sys.executable,
            "-m",
            "engine_agent.engines.sim",
            *name,
            "--rank",
            "0",
            "--role",
            "leader",
            "--followers",
            "0",
        ),
        *("--leader", "127.0.0.1:1", "--host", "127.0.0.1", "--port", str(engine), "--admin-port", str(engine_admin)),
        *(
            "--served-model",
            contenders.MODEL,
            "--max-model-len",
            str(longest_tokens),
            "--load-time-s",
            "0",
            *model,
            *fault,
        ),
    )
    proxy_words = (
        *(
            sys.executable,
            "-m",
            "engine_agent.proxy",
            *name,
            "--port",
            str(proxy),
            "--agent-check-port",
            str(agent_check),
        ),
        *("--admin-port", str(admin), "--engine", f"http://127.0.0.1:{engine}", "--model", contenders.MODEL),
        *("--max-concurrency", str(parameters.max_num_seqs), "--no-access-log"),
    )
    with (
        contenders.spawned(engine_words, folder / f"engine-{number}.log"),
        contenders.spawned(proxy_words, folder / f"proxy-{number}.log"),
    ):
        yield SimCell(CellEndpoint(f"c-{number}", 1, "127.0.0.1", proxy, agent_check, parameters.max_num_seqs), engine)
