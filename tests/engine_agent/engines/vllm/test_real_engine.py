"""The real engine, from the package's weights to streamed tokens and to its death: one test, for one slow start."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from engine_agent.engines.base import EngineContext
from engine_agent.engines.registry import engine_adapter, engine_pythons
from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import Artifact, EnginePlan
from engine_agent.protocol.ports import ENGINE
from tests.asking import CLIENT
from tests.engine_agent.orders import assignment

ROOT = Path(__file__).resolve().parents[4]
CACHE = Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve()
NODE_ID = "n-000test2"
INSTALL_LIMIT_S = 900
START_LIMIT_S = 240.0
"""A start takes 20 s on two idle cores."""
DEATH_LIMIT_S = 30.0

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(INSTALL_LIMIT_S)]


@dataclass(frozen=True)
class RunningEngine:
    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def parts(self) -> list[psutil.Process]:
        """The engine's processes that still run."""
        return [process for process in psutil.process_iter() if is_of_session(process, self.process.pid)]


def is_of_session(process: psutil.Process, session: int) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == session
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


@pytest.fixture
def artifact() -> Artifact:
    python = install(CACHE, print)
    built = subprocess.run(
        [python, "-m", "engine_agent.engines.vllm.weights", "build", "--cache", CACHE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
        check=True,
    )
    return Artifact(**json.loads(built.stdout.splitlines()[-1]))


@pytest.fixture
def engine(artifact: Artifact, tmp_path: Path) -> Iterator[RunningEngine]:
    plan = EnginePlan(
        "vllm",
        "smollm2",
        max_concurrency=16,
        ready_timeout_s=START_LIMIT_S,
        artifact=artifact,
        args=(
            *("--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(128 * 1024 * 1024)),
            *("--dtype", "float32"),  # greedy text in 16 bits depends on how the CPU rounds
        ),
    )
    context = EngineContext(NODE_ID, tmp_path, "127.0.0.1", free_port() - ENGINE, ROOT, engine_pythons(CACHE))
    adapter = engine_adapter("vllm")
    launch = adapter.launch(assignment(plan=plan), context)
    log = tmp_path / "engine.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            launch.argv,
            env={**os.environ, **launch.env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        url = adapter.health_url(assignment(plan=plan), context).removesuffix("/health")
        running = RunningEngine(process, url, log)
        try:
            wait_until(lambda: health(running) == 200, START_LIMIT_S, running)
            yield running
        finally:
            for part in running.parts():
                part.kill()
            shutil.rmtree(runtime_folder(), ignore_errors=True)


def runtime_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"switchyard-engine-{os.getuid()}-{NODE_ID}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def health(engine: RunningEngine) -> int | None:
    """Status of the engine's health, None while nobody answers."""
    try:
        return CLIENT.get(f"{engine.url}/health", timeout=5.0).status_code
    except httpx.TransportError:
        return None


def wait_until(condition: Callable[[], bool], limit_s: float, engine: RunningEngine) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        last_words = engine.log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, f"not within {limit_s} s; the engine's log ends with\n{last_words}"
        time.sleep(0.1)


def test_the_engine_serves_what_it_should_until_its_core_is_killed(
    engine: RunningEngine, subtests: pytest.Subtests
) -> None:
    for check in (
        greedy_text_is_what_the_weights_know,
        a_chat_streams_tokens_and_ends_where_the_template_says,
        every_process_carries_the_nodes_id,
        all_that_vllm_leaves_lying_about_is_in_one_folder,
        when_its_core_is_killed_the_engine_is_unhealthy_and_ends,
    ):
        with subtests.test(check.__name__):
            check(engine)


def greedy_text_is_what_the_weights_know(engine: RunningEngine) -> None:
    asked = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = CLIENT.post(f"{engine.url}/v1/completions", json=asked, timeout=60.0).json()
    assert answer["choices"][0]["text"].startswith(" Paris")


def a_chat_streams_tokens_and_ends_where_the_template_says(engine: RunningEngine) -> None:
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 30,
        "temperature": 0,
        "stream": True,
    }
    with CLIENT.stream("POST", f"{engine.url}/v1/chat/completions", json=asked, timeout=60.0) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "The capital of France is Paris."
    assert choices[-1]["finish_reason"] == "stop"
    assert len(choices) > 5


def every_process_carries_the_nodes_id(engine: RunningEngine) -> None:
    titles = [" ".join(part.cmdline()) for part in engine.parts()]
    assert len(titles) == 2
    assert [title for title in titles if NODE_ID not in title] == []


def all_that_vllm_leaves_lying_about_is_in_one_folder(engine: RunningEngine) -> None:
    assert engine.parts()
    assert list(runtime_folder().glob("vllm_dist_*"))


def when_its_core_is_killed_the_engine_is_unhealthy_and_ends(engine: RunningEngine) -> None:
    before = set(os.listdir("/dev/shm"))
    core = next(part for part in engine.parts() if part.pid != engine.process.pid)
    core.kill()
    wait_until(lambda: health(engine) != 200, DEATH_LIMIT_S, engine)
    wait_until(lambda: engine.parts() == [], DEATH_LIMIT_S, engine)
    assert set(os.listdir("/dev/shm")) <= before
    assert not runtime_folder().exists()
