"""Real vLLM on one node process or several, as the registry renders a version and an agent starts it."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import msgspec
import psutil

from engine_agent.engines.base import EngineContext
from engine_agent.engines.registry import engine_adapter, engine_pythons
from engine_agent.engines.vllm.adapter import VllmAdapter
from engine_agent.engines.vllm.options import HANG_VARIABLE
from engine_agent.node.identity import with_certificate
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from engine_agent.protocol.ports import KV_TRANSFER, PORTS_PER_NODE
from engine_agent.protocol.states import CellRole, MemberRole, Phase
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.engine_arguments import render_engine_plan
from models_registry.versions.planning.spec import HeadCounts, VersionSpec
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.forks import Begin, EngineProcess, started
from tests.ports import free_ports
from tests.session_guard import holds_within

ROOT = Path(__file__).resolve().parents[4]
CACHE = Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve()
START_LIMIT_S = 600.0
"""A start takes 13 s on two idle cores, and minutes on a machine that runs a fleet."""
ANSWER_LIMIT_S = 600.0
BUILD_LIMIT_S = 900.0
LOCAL = INSTANCE_TYPES["local.cpu"]
_NUMBERS = count()
"""Of cells: an engine starts by emptying the folder of its node, so no two may share a name."""
TEXT = "The capital of France is Paris, and trains run on rails between the cities of the north and of the south. "
PROMPTS = tuple((TEXT * 3)[index : index + 5 + 20 * index] for index in range(16))
"""Of 5 to 300 characters; a text that repeats itself gives drafts something to find."""
TOKENS = 12
KV_BYTES_OF_A_LAYER = 9 * 1024 * 1024
"""Room for some 4,000 tokens."""


def plan_of(
    artifact: Artifact,
    nodes: int = 1,
    speculation: dict[str, Any] | None = None,
    adapters: Sequence[dict[str, Any]] = (),
    workers: int = 1,
    stages: int = 1,
    **options: Any,
) -> EnginePlan:
    """A version over so many nodes of so many workers, rendered. In 32 bits: greedy text of a 16-bit model differs with
    the number of ranks, which add up in another order, and with how a CPU rounds."""
    config = json.loads((Path(urlparse(artifact.uri).path) / "config.json").read_text())
    layers: int = config["num_hidden_layers"]
    version = VersionSpec(
        model="smollm2",
        version="1",
        engine="vllm",
        artifact_uri=artifact.uri,
        artifact_digest=artifact.digest,
        context_length=2048,
        max_concurrency=16,
        ready_timeout_s=START_LIMIT_S,
        parallelism={LOCAL.name: {"nodes": nodes, "tp": nodes * workers // stages, "pp": stages}},
        heads=HeadCounts(config["num_attention_heads"], config["num_key_value_heads"], layers),
        engine_options={
            "enforce_eager": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": KV_BYTES_OF_A_LAYER * layers,
            **options,
        },
        speculation=speculation or {},
        adapters=tuple(adapters),
    )
    return render_engine_plan(version, replace(LOCAL, cores=workers))


def padded_artifact(python: Path, ranks: int = 2) -> Artifact:
    """SmolLM2 with heads that so many ranks can share."""
    build = (str(python), "-m", "engine_agent.engines.vllm.weights", "build", "--cache", str(CACHE))
    command = (*build, "--ranks", str(ranks))
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=True)
    return Artifact(**json.loads(built.stdout.splitlines()[-1]))


class RunningCell:
    """The engine processes of one generation of one cell, rank by rank."""

    def __init__(
        self,
        plan: EnginePlan,
        home: Path,
        nodes: int,
        hang_s: float,
        role: CellRole = CellRole.MIXED,
        begin: Begin = started,
    ) -> None:
        self.home = home
        self._begin = begin
        self._role = role
        self._plan = msgspec.structs.replace(plan, env={**plan.env, HANG_VARIABLE: str(hang_s)})
        base = free_ports(nodes * PORTS_PER_NODE)
        number = next(_NUMBERS)
        self._peers = tuple(
            Peer(
                f"n-{os.getpid() % 0x10000:04x}{number:02x}{rank:02x}", rank, "127.0.0.1", base + rank * PORTS_PER_NODE
            )
            for rank in range(nodes)
        )
        self.ranks: list[EngineProcess] = []
        self.url = engine_adapter("vllm").health_url(self._assignment(0), self._context(0)).removesuffix("/health")

    # --- starting and ending ----------------------------------------------------------------------------------------

    def start(self, rank: int) -> EngineProcess:
        """Starts the engine process of a rank."""
        given = self._assignment(rank)
        launch = with_certificate(engine_adapter("vllm").launch(given, self._context(rank)), given)
        # Not the session's home, in which tests of `fleet_stop` end all machines.
        environment = {**os.environ, **launch.env, "SWITCHYARD_HOME": str(self.home)}
        return self._begin(rank, launch.argv, environment, self.home / f"{rank}.log")

    def start_all(self) -> None:
        self.ranks = [self.start(peer.rank) for peer in self._peers]
        self.wait_until(self._is_ready, START_LIMIT_S)

    def _is_ready(self) -> bool:
        assert all(process.poll() is None for process in self.ranks), f"ended at once: {self.last_words(0)}"
        return all(self.health(peer.rank)[0] == 200 for peer in self._peers)

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Signals a rank's engine process."""
        self.ranks[rank].send_signal(how)

    def end(self) -> None:
        for process in self.ranks:
            for part in parts_of(process):
                part.kill()
            process.wait(30)
        for peer in self._peers:
            shutil.rmtree(runtime_folder(peer.node), ignore_errors=True)

    # --- what it says -----------------------------------------------------------------------------------------------

    def health(self, rank: int) -> tuple[int | None, str]:
        """Status and reason of a rank's health; None while it does not answer."""
        try:
            answer = CLIENT.get(
                engine_adapter("vllm").health_url(self._assignment(rank), self._context(rank)), timeout=5
            )
        except httpx.TransportError as error:
            return None, str(error)
        return answer.status_code, answer.json().get("reason", "") if answer.content else ""

    def steps_url(self, rank: int) -> str:
        """Where a rank serves its step times."""
        return VllmAdapter().steps_url(self._assignment(rank), self._context(rank))

    def last_words(self, rank: int) -> str:
        """The last line of a log, which becomes the reason that the agent reports."""
        return (self.home / f"{rank}.log").read_text(errors="replace").rstrip().rpartition("\n")[2]

    def complete(self, **asked: Any) -> dict[str, Any]:
        """One completion, greedy unless stated otherwise."""
        body = {"model": "smollm2", "temperature": 0, **asked}
        answer = CLIENT.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_LIMIT_S)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def tokens(self, prompt: str, max_tokens: int, **asked: Any) -> list[int]:
        """The token ids of one greedy completion."""
        ids: list[int] = self.complete(prompt=prompt, max_tokens=max_tokens, return_token_ids=True, **asked)[
            "token_ids"
        ]
        return ids

    def texts(self, prompts: Sequence[str], max_tokens: int, **asked: Any) -> dict[str, str]:
        """Greedy texts of prompts that are all sent together, by prompt."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            choices = clients.map(lambda prompt: self.complete(prompt=prompt, max_tokens=max_tokens, **asked), prompts)
            return {prompt: choice["text"] for prompt, choice in zip(prompts, choices, strict=True)}

    def metric(self, name: str) -> float:
        lines = CLIENT.get(f"{self.url}/metrics", timeout=ANSWER_LIMIT_S).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    @property
    def kv_port(self) -> int:
        """Where decode engines connect to its leader."""
        return self._peers[0].port_base + KV_TRANSFER

    def node(self, rank: int) -> str:
        return self._peers[rank].node

    def parts(self, rank: int) -> list[psutil.Process]:
        return parts_of(self.ranks[rank])

    def threads(self, rank: int) -> list[str]:
        """The names of all threads of a rank."""
        tasks = (Path(f"/proc/{part.pid}/task").glob("*/comm") for part in self.parts(rank))
        return [name.read_text().strip() for task in tasks for name in task]

    def shared_memory(self) -> set[str]:
        """Names in /dev/shm that its processes share now, without those of other fleets."""
        parts = [part for peer in self._peers for part in self.parts(peer.rank)]
        maps = "".join(Path(f"/proc/{part.pid}/maps").read_text() for part in parts)
        return set(re.findall(r"/dev/shm/(\S*switchyard-\S*)", maps))

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        assert holds_within(condition, limit_s), f"not within {limit_s} s; logs end with\n{self._ends_of_logs()}"

    def _ends_of_logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in self.home.iterdir())

    def _assignment(self, rank: int) -> Assignment:
        role = MemberRole.LEADER if rank == 0 else MemberRole.FOLLOWER
        return Assignment(
            *("c-test", 1, rank, role, Phase.SERVE, self._plan, self._peers, "the cell's secret"),
            cell_role=self._role,
            kv_layout="" if self._role is CellRole.MIXED else "a94f01c2",
        )

    def _context(self, rank: int) -> EngineContext:
        peer = self._peers[rank]
        pythons, fetched = engine_pythons(CACHE), self.home / "fetched"
        return EngineContext(peer.node, self.home, peer.address, peer.port_base, ROOT, pythons, fetched)


@contextmanager
def running_cell(
    plan: EnginePlan,
    home: Path,
    nodes: int = 2,
    hang_s: float = 30.0,
    role: CellRole = CellRole.MIXED,
    begin: Begin = started,
) -> Iterator[RunningCell]:
    """Yields a serving cell until the block ends. `begin`: how its processes are started."""
    home.mkdir()
    cell = RunningCell(plan, home, nodes, hang_s, role, begin)
    try:
        cell.start_all()
        yield cell
    finally:
        cell.end()


def parts_of(process: EngineProcess) -> list[psutil.Process]:
    """Live processes of its session."""
    return [part for part in psutil.process_iter() if _is_of_session(part, process.pid)]


def _is_of_session(process: psutil.Process, session: int) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == session
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def runtime_folder(node: str) -> Path:
    return Path(tempfile.gettempdir()) / f"switchyard-engine-{os.getuid()}-{node}"
