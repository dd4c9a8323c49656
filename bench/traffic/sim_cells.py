"""Real `sim` cells with their cell proxies, for the runs that confirm what the simulation says. It measures nothing."""

import contextlib
import json
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import chain
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
    folder: Path,
    base: int,
    parameters: ModelParameters,
    slow_factors: Sequence[float],
    longest_tokens: int = 8192,
    *,
    proxy_arguments: Sequence[str] = (),
) -> Iterator[list[SimCell]]:
    """A cell for each factor, so many times as slow as `parameters` say, all up and answering."""
    with ExitStack() as stack:
        cells = [
            stack.enter_context(
                _cell(
                    folder, number, base + PORTS_PER_CELL * number, parameters, factor, longest_tokens, proxy_arguments
                )
            )
            for number, factor in enumerate(slow_factors)
        ]
        for cell in cells:
            contenders.wait_until_it_answers(cell.endpoint.port)
        yield cells


@dataclass(frozen=True)
class _Ports:
    proxy: int
    proxy_admin: int
    engine: int
    engine_admin: int


@contextlib.contextmanager
def _cell(
    folder: Path,
    number: int,
    base: int,
    parameters: ModelParameters,
    factor: float,
    longest_tokens: int,
    proxy_arguments: Sequence[str],
) -> Iterator[SimCell]:
    ports = _Ports(*range(base, base + 4))
    name = ("--node-id", f"n-{number:08x}", "--cell", f"c-{number}", "--generation", "1")
    engine = _engine_command(name, ports, parameters, factor, longest_tokens)
    proxy = (*_proxy_command(name, ports, parameters.max_num_seqs), *proxy_arguments)
    with (
        contenders.spawned(engine, folder / f"engine-{number}.log"),
        contenders.spawned(proxy, folder / f"proxy-{number}.log"),
    ):
        endpoint = CellEndpoint(f"c-{number}", 1, "127.0.0.1", ports.proxy, parameters.max_num_seqs)
        yield SimCell(endpoint, ports.engine)


def _engine_command(
    name: Sequence[str], ports: _Ports, parameters: ModelParameters, factor: float, longest_tokens: int
) -> tuple[str, ...]:
    model = ((f"--{each.name.replace('_', '-')}", str(getattr(parameters, each.name))) for each in fields(parameters))
    return (
        *(sys.executable, "-m", "engine_agent.engines.sim", *name),
        *("--rank", "0", "--role", "leader", "--followers", "0", "--leader", "127.0.0.1:1"),
        *("--port", str(ports.engine), "--admin-port", str(ports.engine_admin)),
        *("--served-model", contenders.MODEL, "--max-model-len", str(longest_tokens), "--load-time-s", "0"),
        *chain.from_iterable(model),
        *(("--fault", json.dumps({"kind": "slow", "factor": factor})) if factor > 1 else ()),
    )


def _proxy_command(name: Sequence[str], ports: _Ports, max_concurrency: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "engine_agent.cell_proxy", *name),
        *("--port", str(ports.proxy), "--admin-port", str(ports.proxy_admin)),
        *("--engine", f"http://127.0.0.1:{ports.engine}"),
        *("--model", contenders.MODEL, "--max-concurrency", str(max_concurrency), "--no-access-log"),
    )
