"""Speculation from the registry's fields to a real engine: guesses are made and right, and no text changes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_agent.engines.base import EngineContext
from engine_agent.engines.registry import engine_adapter, engine_pythons
from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import Artifact, EnginePlan
from engine_agent.protocol.ports import ENGINE, PORTS_PER_NODE
from models_registry.planning.engine_arguments import render_engine_plan
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.versions import HeadCounts, VersionSpec
from tests.asking import CLIENT
from tests.engine_agent.orders import assignment
from tests.engine_agent.runtime.agents import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve()
START_LIMIT_S = 240.0
"""A start takes 20 s on two idle cores."""
LOCAL = INSTANCE_TYPES["local.cpu"]
PROMPTS = [
    "The capital of France is",
    "One, two, three, four, one, two, three, four, one, two,",
    "Trains run on rails. Trains run on rails. Trains run on",
]
TOKENS = 24


@dataclass(frozen=True)
class Served:
    """What an engine answered, the steps in which it guessed, and how many of its guesses were right."""

    texts: list[str]
    drafts: float
    accepted: float


def built(python: Path) -> Artifact:
    command = [str(python), "-m", "engine_agent.engines.vllm.weights", "build", "--cache", str(CACHE), "--ranks", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    return Artifact(**json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def running(plan: EnginePlan, home: Path) -> Iterator[str]:
    """URL of a real engine that serves this plan, until the block ends."""
    home.mkdir()
    base = free_ports(PORTS_PER_NODE)
    context = EngineContext(f"n-{os.getpid():08x}", home, "127.0.0.1", base, ROOT, engine_pythons(CACHE))
    launch = engine_adapter("vllm").launch(assignment(plan=plan), context)
    log = home / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.argv, env={**os.environ, **launch.env}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{base + ENGINE}"
        deadline = time.monotonic() + START_LIMIT_S
        while not is_healthy(url):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_healthy(url: str) -> bool:
    try:
        return CLIENT.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def text(url: str, prompt: str) -> str:
    asked = {"model": "smollm2", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    answer = CLIENT.post(f"{url}/v1/completions", json=asked, timeout=120)
    return str(answer.json()["choices"][0]["text"])


def counter(url: str, name: str) -> float:
    lines = CLIENT.get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def serve(artifact: Artifact, speculation: dict[str, Any], home: Path) -> Served:
    version = VersionSpec(
        model="smollm2",
        version="1",
        engine="vllm",
        artifact_uri=artifact.uri,
        artifact_digest=artifact.digest,
        context_length=2048,
        max_concurrency=16,
        ready_timeout_s=240.0,
        parallelism={LOCAL.name: {"nodes": 1}},
        heads=HeadCounts(attention=12, kv=4, layers=30),
        # 32-bit, so that verifying several tokens at once rounds to the same choices as one at a time.
        engine_options={"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 256 * 1024 * 1024},
    )
    plan = render_engine_plan(replace(version, speculation=speculation), LOCAL)
    with running(plan, home) as url:
        texts = [text(url, prompt) for prompt in PROMPTS]
        counts = [counter(url, f"vllm:spec_decode_num_{what}_total") for what in ("drafts", "accepted_tokens")]
    return Served(texts, *counts)


def test_speculation_of_a_version_runs_and_changes_no_text(tmp_path: Path, subtests: pytest.Subtests) -> None:
    artifact = built(install(CACHE, print))
    plain = serve(artifact, {}, tmp_path / "plain")
    assert plain.drafts == 0
    itself = {"draft_uri": artifact.uri, "draft_digest": artifact.digest}
    for speculation, least in (
        ({"method": "ngram", "tokens": 3, "lookup_max": 3, "lookup_min": 1}, 0.3),
        ({"method": "draft_model", "tokens": 3, **itself}, 2.0),
    ):
        with subtests.test(str(speculation["method"])):
            served = serve(artifact, speculation, tmp_path / str(speculation["method"]))
            assert served.texts == plain.texts
            assert served.accepted / served.drafts > least
