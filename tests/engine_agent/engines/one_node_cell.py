"""Real engines of one node behind the real cell proxy, both by the agent's command lines, for engines that serve the
demo's weights as one file; and what each of them must do."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from engine_agent.engines.artifacts import verify_folder
from engine_agent.engines.base import EngineContext
from engine_agent.engines.llama_cpp import weights
from engine_agent.engines.llama_cpp.environment import install
from engine_agent.engines.registry import check_plan, engine_adapter, engine_pythons
from engine_agent.node.launch import proxy_launch
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from engine_agent.protocol.ports import ENGINE, PORTS_PER_NODE, PROXY, PROXY_ADMIN
from engine_agent.protocol.states import MemberRole, Phase
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.engine_arguments import check_engine_options, render_engine_plan
from models_registry.versions.planning.spec import VersionSpec
from tests.asking import CLIENT
from tests.engine_agent.engines.request_table import TABLE, outcome_of
from tests.engine_agent.engines.vllm.running_cell import CACHE
from tests.ports import free_ports

LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parents[3]
LOCAL = INSTANCE_TYPES["local.cpu"]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WHY = [{"role": "user", "content": "Say why"}]
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
Form = tuple[str, dict[str, Any]]
FORMS: tuple[Form, ...] = (
    (CHAT, {"messages": WHY, "max_tokens": 4}),
    (CHAT, {"messages": WHY, "max_tokens": 4, "stream": True}),
    (COMPLETIONS, {"prompt": "Say why", "max_tokens": 3}),
    (COMPLETIONS, {"prompt": "Say why", "max_tokens": 3, "stream": True}),
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 12, "stop": ["a", "e"]}),
)
"""Requests in forms in which every engine reports usage."""


@dataclass
class Cell:
    """One node with engine and cell proxy."""

    plan: EnginePlan
    node: EngineContext
    engine: "subprocess.Popen[bytes]"
    seen: set[int]
    """Statuses of /health until the first 200, with it."""

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.node.port_base + ENGINE}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.node.port_base + PROXY}"

    def ask(self, path: str, status: int = 200, **members: Any) -> Any:
        answer = CLIENT.post(f"{self.url}{path}", json={"model": "tiny", **members}, timeout=LIMIT_S)
        assert answer.status_code == status, answer.text
        return answer.json()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = CLIENT.get(f"http://127.0.0.1:{self.node.port_base + PROXY_ADMIN}/status").json()
        return found

    def counted(self) -> dict[str, int]:
        """What the proxy counted, over all classes."""
        rows = self.status()["load"]["classes"].values()
        names = ("requests_total", "prompt_tokens_total", "completion_tokens_total", "in_flight")
        return {name: sum(row.get(name, 0) for row in rows) for name in names}


def eventually(condition: Callable[[], Any], what: str) -> Any:
    ends_s = monotonic() + LIMIT_S
    while monotonic() < ends_s:
        try:
            if found := condition():
                return found
        except httpx.TransportError:
            pass
        sleep(0.01)
    raise AssertionError(f"still not after {LIMIT_S:g} s: {what}")


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    """The demo's weights, as `make engine ENGINE=llama-cpp` leaves them."""
    install(CACHE, print)
    assert weights.main(["build", "--cache", str(CACHE)]) == 0
    (folder,) = (CACHE / "artifacts").glob(f"{weights.NAME}-*")
    return Artifact(folder.as_uri(), verify_folder(folder).digest)


def plan_of(artifact: Artifact, context_length: int = 2048, engine: str = "llama-cpp", **options: Any) -> EnginePlan:
    version = VersionSpec(
        model="tiny",
        version="1",
        engine=engine,
        artifact_uri=artifact.uri,
        artifact_digest=artifact.digest,
        context_length=context_length,
        max_concurrency=2,
        ready_timeout_s=LIMIT_S,
        parallelism={LOCAL.name: {}},
        engine_options=options,
        golden_prompts=(("The capital of France is", "Paris"),),
    )
    check_engine_options(version, LOCAL.name)
    plan = render_engine_plan(version, LOCAL)
    check_plan(plan)
    return plan


def started(plan: EnginePlan, home: Path, base: int) -> "tuple[subprocess.Popen[bytes], Assignment, EngineContext]":
    node = EngineContext("n-00000001", home, "127.0.0.1", base, ROOT, engine_pythons(CACHE), CACHE / "fetched")
    peers = (Peer("n-00000001", 0, "127.0.0.1", base),)
    order = Assignment("c-1", 1, 0, MemberRole.LEADER, Phase.SERVE, plan=plan, peers=peers, secret="s")
    launch = engine_adapter(plan.engine).launch(order, node)
    with (home / "engine.log").open("wb") as log:
        environment = {**os.environ, **launch.env}
        process = subprocess.Popen(launch.argv, env=environment, stdout=log, stderr=log, start_new_session=True)
    return process, order, node


@contextmanager
def running_cell(plan: EnginePlan, home: Path) -> Iterator[Cell]:
    engine, order, node = started(plan, home, free_ports(PORTS_PER_NODE))
    proxy = None
    try:
        cell = Cell(plan, node, engine, set())

        def is_ready() -> bool:
            cell.seen.add(CLIENT.get(engine_adapter(plan.engine).health_url(order, node)).status_code)
            return 200 in cell.seen

        eventually(is_ready, "the engine is ready")
        launch = proxy_launch(order, node)
        proxy = subprocess.Popen(launch.argv, env={**os.environ, **launch.env}, stdout=subprocess.DEVNULL)
        eventually(lambda: cell.status()["health"]["ok"], "its golden prompt is answered")
        yield cell
    finally:
        for process in (proxy, engine):
            if process is not None:
                process.kill()
                process.wait()


def it_was_unhealthy_while_it_loaded(cell: Cell) -> None:
    assert cell.seen == {503, 200}


def it_serves_what_the_weights_know(cell: Cell) -> None:
    found = cell.ask(COMPLETIONS, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert found["choices"][0]["text"].startswith(" Paris")
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 4
    assert [model["id"] for model in CLIENT.get(f"{cell.engine_url}/v1/models").json()["data"]] == ["tiny"]


def a_chat_streams_tokens(cell: Cell) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": WHY, "max_tokens": 10, "temperature": 0}
    whole = cell.ask(CHAT, **body)["choices"][0]["message"]["content"]
    with CLIENT.stream("POST", f"{cell.url}{CHAT}", json={**body, "stream": True}, timeout=LIMIT_S) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole
    assert choices[-1]["finish_reason"] == "length"
    assert len(choices) > 5


def a_schema_is_kept(cell: Cell) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}}
    found = cell.ask(CHAT, messages=WHY, max_tokens=60, response_format=wanted, seed=1)
    answer = json.loads(found["choices"][0]["message"]["content"])
    assert sorted(answer) == ["city", "people"]
    assert isinstance(answer["people"], int)


def a_cell_that_drains_ends_what_it_has(cell: Cell) -> None:
    admin = f"http://127.0.0.1:{cell.node.port_base + PROXY_ADMIN}/phase"
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with CLIENT.stream("POST", f"{cell.url}{COMPLETIONS}", json=body, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert CLIENT.post(admin, json={"phase": "drain"}).status_code == 200
        assert cell.ask(COMPLETIONS, 503, prompt="x")["error"]["code"] == "cell_draining"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    eventually(lambda: cell.status()["in_flight"] == 0, "it is empty")
    assert CLIENT.post(admin, json={"phase": "serve"}).status_code == 200
    cell.ask(COMPLETIONS, prompt="x", max_tokens=1)


def answer_all(cell: Cell, forms: Sequence[Form]) -> None:
    for path, body in forms:
        answer = CLIENT.post(f"{cell.url}{path}", json={"model": "tiny", **body}, timeout=LIMIT_S)
        assert answer.status_code == 200, (path, answer.text)
    eventually(lambda: cell.counted()["in_flight"] == 0, "all requests have ended")


def no_request_of_the_table_stops_it_or_counts_against_it(cell: Cell) -> None:
    """Outcomes differ from vLLM's: other engines take or refuse other members."""
    found = [asyncio.run(outcome_of(cell.node.port_base, row)) for row in TABLE]
    assert [(row, got) for row, got in zip(TABLE, found, strict=True) if got[0] >= 500] == []
    assert cell.engine.poll() is None
    assert cell.status()["load"]["errors_total"] == 0
