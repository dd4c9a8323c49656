"""Routers that the bench compares: Switchyard's own processes and the peers from PyPI, each with its version and
command.

Each peer has its own environment under the cache. One that cannot be installed or does not answer is left out and named
in the report."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from bench import ROOT, cpu_s, family
from engine_agent.ingress.agent import JOURNAL_FILE
from engine_agent.ingress.main import JOIN_TOKEN_VARIABLE
from engine_agent.node.journal import Journal
from engine_agent.protocol.identity import PLAIN_LINKS_VARIABLE
from engine_agent.protocol.ingress_messages import Affinity, CellEndpoint, Pool, RoutingTable

MODEL = "tiny"
REGION = "bench"
NO_CONTROL_PLANE = "http://127.0.0.1:1"
"""Instead of a control plane: an ingress serves from its journal without one."""
CHECKOUT: ContextVar[Path] = ContextVar("checkout", default=ROOT)
"""Our own processes import the packages of this one."""
PLACES = 1024
"""Concurrent requests per cell. No round needs more, so no request queues."""
READY_WITHIN_S = 90.0
INSTALL_LIMIT_S = 600.0


@dataclass(frozen=True)
class Peer:
    """A router from PyPI. `words` is its command with PORT, METRICS, URL1, URL2 and CONFIG in place of values."""

    name: str
    requirement: str
    words: tuple[str, ...]
    rate: int = 300
    """Streams a second at which its added time is measured: fewer where it cannot do more."""


PEERS = (
    Peer(
        "vllm-router",
        "vllm-router==0.1.17",
        ("vllm-router", "--worker-urls", "URL1", "URL2", "--policy", "power_of_two", "--host", "127.0.0.1",
         "--port", "PORT", "--prometheus-port", "METRICS", "--log-level", "warning"),
    ),
    Peer(
        "smg",
        "smg==1.13.0",
        ("smg", "launch", "--worker-urls", "URL1", "URL2", "--policy", "power_of_two", "--host", "127.0.0.1",
         "--port", "PORT", "--prometheus-port", "METRICS", "--log-level", "warn"),
    ),
    Peer(
        "sglang-router",
        "sglang-router==0.3.2",
        ("python", "-m", "sglang_router.launch_router", "--worker-urls", "URL1", "URL2", "--policy", "power_of_two",
         "--host", "127.0.0.1", "--port", "PORT", "--prometheus-port", "METRICS", "--log-level", "warn"),
    ),
    Peer(
        "litellm",
        "litellm[proxy]==1.106.0",
        ("litellm", "--config", "CONFIG", "--host", "127.0.0.1", "--port", "PORT", "--num_workers", "1"),
        rate=20,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """Something that answers on `port` by these processes and their children. `rate`: streams a second sent to it."""

    name: str
    port: int
    processes: tuple[psutil.Process, ...] = ()
    rate: int = 300

    def _all(self) -> list[psutil.Process]:
        return [each for process in self.processes for each in family(process.pid)]

    def cpu_s(self) -> float:
        return cpu_s(self._all())

    def resident_mib(self) -> float:
        """Resident memory of its processes, shared pages counted in each."""
        return sum(each.memory_info().rss for each in self._all()) / 2**20


def install(peer: Peer, cache: Path) -> Path:
    home = cache / peer.name
    stamp = home / "installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == peer.requirement:
        return home / "bin"
    uv = (sys.executable, "-m", "uv")
    for words in (
        (*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)),
        (*uv, "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), peer.requirement),
    ):
        done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the installer failed")
    stamp.write_text(peer.requirement, encoding="utf-8")
    return home / "bin"


@contextlib.contextmanager
def spawned(words: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Iterator[psutil.Process]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            words,
            cwd=CHECKOUT.get(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )
    process = psutil.Process(child.pid)
    try:
        yield process
    finally:
        members = family(child.pid)
        for each in members:
            with contextlib.suppress(psutil.Error):
                each.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(members, timeout=5)
        for each in alive:
            with contextlib.suppress(psutil.Error):
                each.kill()
        child.wait()


@contextlib.contextmanager
def ingress(
    home: Path,
    port: int,
    cells: Sequence[CellEndpoint],
    affinity: Affinity | None = None,
    *options: str,
    certify: Callable[[Path], None] | None = None,
    grpc: bool = False,
    names: tuple[str, ...] = ("i-bench",),
    **of_pool: bool,
) -> Iterator[psutil.Process]:
    """An ingress agent with its HAProxy, serving `MODEL` from these cells by a table in its journal; `options` are more
    of its command line. `certify` gives its home a certificate: it reaches cells over TLS; without, in plain.
    `names`: its id, and those of the ingresses that share the cells with it. `of_pool`: settings of its pool."""
    pool = msgspec.structs.replace(
        Pool(MODEL, (MODEL,), "realtime", tuple(cells), (), {REGION: 1.0}, affinity), **of_pool
    )
    home.mkdir(parents=True, exist_ok=True)
    if certify:
        certify(home)
    sharing = tuple(sorted(names)) if len(names) > 1 else ()
    table = RoutingTable(1, REGION, (pool,), grpc=grpc, ingresses=sharing)
    Journal(home / JOURNAL_FILE, RoutingTable).save(table)
    words = (sys.executable, "-m", "engine_agent", "ingress", "--ingress-id", names[0], "--region", REGION)
    where = ("--home", str(home), "--server", NO_CONTROL_PLANE, "--port", str(port))
    with spawned(
        (*words, *where, *options),
        home / "agent.log",
        {JOIN_TOKEN_VARIABLE: "none", PLAIN_LINKS_VARIABLE: "0" if certify else "1"},
    ) as process:
        yield process


@contextlib.contextmanager
def cell_proxy(
    folder: Path,
    number: int,
    port: int,
    engine_port: int,
    certify: Callable[[Path, str], None] | None = None,
    python: str = sys.executable,
) -> Iterator[tuple[CellEndpoint, psutil.Process]]:
    """A cell proxy before one stub cell, on `port` and `port` + 2; over TLS if it is given a certificate."""
    node, home = f"n-bench{number:03d}", folder / f"node-{number}"
    if certify:
        certify(home, node)
    words = (
        *(python, "-m", "engine_agent.cell_proxy", "--node-id", node, "--cell", f"c-{number}"),
        *("--generation", "1", "--port", str(port), "--admin-port", str(port + 2)),
        *("--engine", f"http://127.0.0.1:{engine_port}", "--model", MODEL, "--max-concurrency", str(PLACES)),
        "--no-access-log",
        *(("--identity", str(home)) if certify else ()),
    )
    with spawned(words, folder / f"cell-proxy-{number}.log") as process:
        yield CellEndpoint(f"c-{number}", 1, "127.0.0.1", port, PLACES, node=node), process


@contextlib.contextmanager
def peer_process(peer: Peer, programs: Path, folder: Path, port: int, cells: Sequence[int]) -> Iterator[psutil.Process]:
    """A peer that serves `MODEL` from the cells on these ports, without asking others for anything."""
    config = folder / f"{peer.name}.json"
    entries = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"http://127.0.0.1:{cell}/v1",
                "api_key": "none",
            },
        }
        for cell in cells
    ]
    config.write_text(json.dumps({"model_list": entries}), encoding="utf-8")
    values = {"PORT": str(port), "METRICS": str(port + 50), "CONFIG": str(config)}
    values |= {f"URL{number}": f"http://127.0.0.1:{cell}" for number, cell in enumerate(cells, 1)}
    words = [values.get(word, word) for word in peer.words]
    # vllm-router writes a line for every request unless turned off here; litellm fetches prices from the internet.
    quiet = {"RUST_LOG": "warn", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    quiet["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # it serves loopback, to this bench alone
    with spawned((str(programs / words[0]), *words[1:]), folder / f"{peer.name}.log", quiet) as process:
        yield process


def wait_until_it_answers(port: int, within_s: float = READY_WITHIN_S, process: psutil.Process | None = None) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
    ends_at = time.monotonic() + within_s
    last_error = "nothing"
    while time.monotonic() < ends_at:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10):  # noqa: S310 - loopback
                return
        except OSError as error:
            last_error = str(error)
        if process is not None and (not process.is_running() or process.status() == psutil.STATUS_ZOMBIE):
            raise RuntimeError("its process exited immediately; see its log under .cache/bench/runs")
        time.sleep(0.2)
    raise RuntimeError(f"no answer on port {port} within {within_s:g} s: {last_error}")
