"""Real llama.cpp behind the real cell proxy, both by the agent's command lines, from a version to its death: one start
for the file, one more for the engine that sleeps."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator
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
from engine_agent.engines.llama_cpp.serve import EXIT_ADDRESS_IN_USE, EXIT_CANNOT_SERVE
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

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parents[4]
LOCAL = INSTANCE_TYPES["local.cpu"]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WHY = [{"role": "user", "content": "Say why"}]
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": WHY, "max_tokens": 4}),
    (CHAT, {"messages": WHY, "max_tokens": 4, "stream": True}),
    (COMPLETIONS, {"prompt": "Say why", "max_tokens": 3}),
    (COMPLETIONS, {"prompt": "Say why", "max_tokens": 3, "stream": True}),
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 12, "stop": ["a", "e"]}),
    ("/v1/responses", {"input": "Say why", "max_output_tokens": 3, "store": False}),
    ("/v1/responses", {"input": "Say why", "max_output_tokens": 3, "store": False, "stream": True}),
    ("/v1/messages", {"messages": WHY, "max_tokens": 3}),
    ("/v1/messages", {"messages": WHY, "max_tokens": 3, "stream": True}),
)
"""Each form in which it reports usage."""


OPTIONS: dict[str, Any] = {
    "embeddings": True, "pooling": "mean", "cache_prompt": True, "cache_ram": 16, "kv_unified": True,
    "batch_size": 256, "ubatch_size": 256, "flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0",
    "threads": 1, "threads_batch": 2, "gpu_layers": 0, "seed": 7, "repeat_penalty": 1.0,
    "temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
}  # fmt: skip


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

    def counter(self, name: str) -> int:
        page = CLIENT.get(f"{self.engine_url}/metrics").text
        (line,) = (line for line in page.splitlines() if line.startswith(f"llamacpp:{name} "))
        return int(float(line.rpartition(" ")[2]))


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


@pytest.fixture(scope="module")
def cell(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    with running_cell(plan_of(artifact, temperature=0.2, top_p=0.9), tmp_path_factory.mktemp("llama")) as cell:
        yield cell


def test_it_serves_what_it_should_until_it_is_killed(cell: Cell, subtests: pytest.Subtests) -> None:
    for check in (
        it_was_unhealthy_while_it_loaded,
        it_serves_what_the_weights_know,
        every_token_is_counted,
        a_chat_streams_tokens,
        a_schema_is_kept,
        probabilities_are_told,
        what_it_lacks_has_the_error_of_its_api,
        what_would_not_be_counted_is_refused,
        a_prompt_that_is_too_long_is_named,
        no_request_counts_against_the_cell,
        a_client_that_leaves_frees_its_slot,
        no_prompt_is_found_in_the_cache,
        a_name_of_a_conversation_reaches_no_other_request,
        a_cell_that_drains_ends_what_it_has,
        a_dead_engine_is_seen,
    ):
        with subtests.test(check.__name__):
            check(cell)


def it_was_unhealthy_while_it_loaded(cell: Cell) -> None:
    assert cell.seen == {503, 200}


def it_serves_what_the_weights_know(cell: Cell) -> None:
    found = cell.ask(COMPLETIONS, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert found["choices"][0]["text"].startswith(" Paris")
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
    for path, members in (
        (COMPLETIONS, {"prompt": "x", "response_format": wanted}),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"choice": ["a"]}}),
        ("/v1/responses", {"input": "x", "store": False, "text": {"format": {"type": "json_object"}}}),
    ):
        error = cell.ask(path, 400, **members)["error"]
        assert error["code"] == "unsupported_parameter"
        assert error["param"] in members
    odd = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "nothing"}}}
    error = cell.ask(CHAT, 400, messages=WHY, response_format=odd)["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "response_format")


def probabilities_are_told(cell: Cell) -> None:
    found = cell.ask(CHAT, messages=WHY, max_tokens=2, logprobs=True, top_logprobs=3)
    tokens = found["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 2
    assert all(len(token["top_logprobs"]) == 3 and token["logprob"] <= 0 for token in tokens)


def what_it_lacks_has_the_error_of_its_api(cell: Cell) -> None:
    error = cell.ask("/v1/embeddings", 404, input="x")["error"]
    assert (error["code"], error["param"]) == ("unsupported_model", "model")


def what_would_not_be_counted_is_refused(cell: Cell) -> None:
    """The usage that it reports is that of the first sequence."""
    for members in ({"prompt": "x", "n": 2}, {"prompt": ["x", "y"]}):
        assert cell.ask(COMPLETIONS, 400, **members)["error"]["param"] in members
    error = cell.ask(COMPLETIONS, 400, prompt="x", grammar='root ::= "yes"')["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "grammar")


def a_prompt_that_is_too_long_is_named(cell: Cell) -> None:
    error = cell.ask(COMPLETIONS, 400, prompt="x " * 3000, max_tokens=2)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def no_request_counts_against_the_cell(cell: Cell) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}
    for members in (
        {"messages": [{"role": "user", "content": [image]}]},
        {"messages": [{"role": "user", "content": [{}]}]},
    ):
        cell.ask(CHAT, 400, **members)
    cell.ask(CHAT, 400, messages=WHY, tools=[{"type": "function"}])
    load = cell.status()["load"]
    assert load["errors_total"] == 0
    assert cell.status()["health"]["ok"]


def a_client_that_leaves_frees_its_slot(cell: Cell) -> None:
    def leaves() -> bool:
        """Whether the request was still running: on a busy host it may be over before the counter is read."""
        with CLIENT.stream("POST", f"{cell.url}{COMPLETIONS}", json={"model": "tiny", **ENDLESS}) as answer:
            next(answer.iter_lines())
            return cell.counter("requests_processing") == 1

    assert any(leaves() for _ in range(10))
    eventually(lambda: cell.counter("requests_processing") == 0, "the slot is free")


def no_prompt_is_found_in_the_cache(cell: Cell) -> None:
    """Whatever the client states, since a prompt of another tenant could be there."""
    for _ in range(3):
        usage = cell.ask(COMPLETIONS, prompt="One two three " * 9, max_tokens=1, cache_prompt=True, id_slot=0)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def a_name_of_a_conversation_reaches_no_other_request(cell: Cell) -> None:
    """llama.cpp would cancel the first answer, and go on with the second without its client."""
    name = {"X-Conversation-Id": "mine"}
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with CLIENT.stream("POST", f"{cell.url}{COMPLETIONS}", json=body, headers=name, timeout=LIMIT_S) as first:
        lines = first.iter_lines()
        next(lines)
        cell_answer = CLIENT.post(f"{cell.url}{COMPLETIONS}", json={**body, "max_tokens": 2}, headers=name)
        assert cell_answer.status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
    with CLIENT.stream("POST", f"{cell.url}{COMPLETIONS}", json={"model": "tiny", **ENDLESS}, headers=name) as left:
        next(left.iter_lines())
    eventually(lambda: cell.counter("requests_processing") == 0, "nobody's answer goes on")


def every_token_is_counted(cell: Cell) -> None:
    """The engine's counters grow by what the proxy counted for requests of every form."""

    def counted() -> dict[str, int]:
        rows = cell.status()["load"]["classes"].values()
        names = ("requests_total", "prompt_tokens_total", "completion_tokens_total", "in_flight")
        return {name: sum(row.get(name, 0) for row in rows) for name in names}

    before = counted()
    prompt = cell.counter("prompt_tokens_total") + cell.counter("prompt_tokens_cached_total")
    completion = cell.counter("tokens_predicted_total")
    for path, body in FORMS:
        answer = CLIENT.post(f"{cell.url}{path}", json={"model": "tiny", **body}, timeout=LIMIT_S)
        assert answer.status_code == 200, (path, answer.text)
    eventually(lambda: counted()["in_flight"] == 0, "all requests have ended")
    after = counted()
    grown = cell.counter("prompt_tokens_total") + cell.counter("prompt_tokens_cached_total") - prompt
    assert after["requests_total"] - before["requests_total"] == len(FORMS)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == grown
    assert (
        after["completion_tokens_total"] - before["completion_tokens_total"]
        == cell.counter("tokens_predicted_total") - completion
    )


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


def a_dead_engine_is_seen(cell: Cell) -> None:
    cell.engine.kill()
    eventually(lambda: not cell.status()["health"]["ok"], "the proxy sees it")
    assert cell.engine.wait() != 0
    error = cell.ask(COMPLETIONS, 503, prompt="x")["error"]
    assert error["code"] == "engine_unhealthy"


def test_an_idle_engine_sleeps_and_wakes_for_a_request(artifact: Artifact, tmp_path: Path) -> None:
    """It also has the options that a version may state, and answers with vectors."""
    with running_cell(plan_of(artifact, sleep_idle_seconds=1, **OPTIONS), tmp_path) as cell:
        awake = memory_bytes(cell.engine.pid)
        eventually(lambda: CLIENT.get(f"{cell.engine_url}/props").json()["is_sleeping"], "it sleeps")
        assert cell.status()["health"]["ok"]
        assert memory_bytes(cell.engine.pid) < awake / 2
        found = cell.ask(COMPLETIONS, prompt="The capital of France is", max_tokens=4, temperature=0)
        assert found["choices"][0]["text"].startswith(" Paris")
        text = "One two three " * 9
        cached = [cell.ask(COMPLETIONS, prompt=text, max_tokens=1)["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert cached[1]["cached_tokens"] > 20
        vectors = [found["embedding"] for found in cell.ask("/v1/embeddings", input=["Paris", "x"])["data"]]
        assert [len(vector) for vector in vectors] == [576, 576]
        assert [round(sum(part * part for part in vector), 3) for vector in vectors] == [1, 1]


def memory_bytes(pid: int) -> int:
    """Memory of a process that no other shares."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
def test_no_request_of_the_table_stops_it_or_counts_against_the_cell(artifact: Artifact, tmp_path: Path) -> None:
    """Its outcomes differ from vLLM's: it takes or refuses other members."""
    with running_cell(plan_of(artifact), tmp_path) as cell:
        found = [asyncio.run(outcome_of(cell.node.port_base, row)) for row in TABLE]
        assert [(row, got) for row, got in zip(TABLE, found, strict=True) if got[0] >= 500] == []
        assert cell.engine.poll() is None
        assert cell.status()["load"]["errors_total"] == 0


@pytest.mark.long
def test_a_context_beyond_the_models_is_refused_and_so_is_a_taken_port(artifact: Artifact, tmp_path: Path) -> None:
    process, *_ = started(plan_of(artifact, context_length=100_000), tmp_path, free_ports(PORTS_PER_NODE))
    assert process.wait(LIMIT_S) == EXIT_CANNOT_SERVE
    assert "the model has a context of 8192 tokens" in (tmp_path / "engine.log").read_text()
    with running_cell(plan_of(artifact), tmp_path) as cell:
        second, *_ = started(plan_of(artifact), tmp_path, cell.node.port_base)
        assert second.wait(LIMIT_S) == EXIT_ADDRESS_IN_USE
