"""A third-party program behind a real cell proxy: by the agent's command lines, from the weights to a counted answer.
The program takes the options of such programs and runs `sim`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from engine_agent.engines.base import EngineContext, Launch
from engine_agent.engines.generic.adapter import GenericAdapter
from engine_agent.engines.generic.environment import installed_programs
from engine_agent.engines.generic.serve import EXIT_BAD_ARTIFACT
from engine_agent.node.launch import proxy_launch
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from engine_agent.protocol.ports import PORTS_PER_NODE
from engine_agent.protocol.states import MemberRole, Phase
from tests.asking import CLIENT
from tests.models_registry.rows import artifact
from tests.ports import free_ports

pytestmark = pytest.mark.processes

DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """#!{python}
import argparse, os, sys
parser = argparse.ArgumentParser()
for name in ("model", "alias", "host", "port", "context-length"):
    parser.add_argument("--" + name)
given = parser.parse_args()
os.execv({python!r}, [
    {python!r}, "-m", "engine_agent.engines.sim", "--node-id", "n-00000001", "--cell", "c-1", "--generation", "1",
    "--rank", "0", "--role", "leader", "--followers", "0", "--leader", "127.0.0.1:1", "--load-time-s", "0",
    "--admin-port", str(int(given.port) + 1), "--port", given.port, "--served-model", given.alias,
    "--max-model-len", given.context_length,
])
"""
"""A third-party server for its cell: it takes only the options of such programs."""


@pytest.fixture
def node(tmp_path: Path) -> EngineContext:
    program = tmp_path / "cache" / "engines" / "generic" / "own" / "serve"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "home").mkdir()
    base = free_ports(PORTS_PER_NODE)
    programs = installed_programs(tmp_path / "cache")
    return EngineContext("n-00000001", tmp_path / "home", "127.0.0.1", base, ROOT, programs, tmp_path / "cache")


def assigned(folder: Path, digest: str) -> Assignment:
    plan = EnginePlan(
        engine="generic",
        served_model="tiny",
        max_concurrency=2,
        ready_timeout_s=60.0,
        artifact=Artifact(folder.as_uri(), digest),
        args=("--context-length", "512", "--command", "own"),
    )
    peers = (Peer("n-00000001", 0, "127.0.0.1", 1),)
    return Assignment("c-1", 1, 0, MemberRole.LEADER, Phase.SERVE, plan=plan, peers=peers, secret="s")


@contextmanager
def running(launch: Launch) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(launch.argv, env={**os.environ, **launch.env}, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def once_ok(url: str) -> httpx.Response:
    ends_s = monotonic() + DEADLINE_S
    while monotonic() < ends_s:
        try:
            if (answer := CLIENT.get(url)).status_code == 200:
                return answer
        except httpx.TransportError:
            pass
        sleep(0.05)
    raise AssertionError(f"{url} does not answer 200 within {DEADLINE_S:g} s")


def test_a_program_serves_behind_the_cell_proxy(node: EngineContext, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    assignment = assigned(folder, artifact(folder).digest)
    adapter = GenericAdapter()
    with running(adapter.launch(assignment, node)):
        models = once_ok(adapter.health_url(assignment, node)).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        with running(proxy_launch(assignment, node)):
            once_ok(f"http://127.0.0.1:{node.port_base}/healthz")
            body: dict[str, Any] = {"model": "tiny", "prompt": "one two three", "max_tokens": 4, "ignore_eos": True}
            answer = CLIENT.post(f"http://127.0.0.1:{node.port_base}/v1/completions", json=body, timeout=DEADLINE_S)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 4
            status = CLIENT.get(f"http://127.0.0.1:{node.port_base + 2}/status").json()
            assert status["load"]["classes"]["realtime"]["completion_tokens_total"] == 4


def test_other_weights_than_the_plan_names_are_not_served(node: EngineContext, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    artifact(folder)
    launch = GenericAdapter().launch(assigned(folder, "sha256:" + "0" * 64), node)
    with running(launch) as process:
        assert process.wait(DEADLINE_S) == EXIT_BAD_ARTIFACT
