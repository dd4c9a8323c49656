"""Real Triton with its Python backend behind the real cell proxy, both by the agent's command lines, from a version to
its death: one start for the file."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_agent.engines.llama_cpp.serve import EXIT_ADDRESS_IN_USE, EXIT_CANNOT_SERVE
from engine_agent.engines.triton.environment import install
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.ports import ENGINE_ADMIN, PORTS_PER_NODE, PROXY_ADMIN
from tests.asking import CLIENT
from tests.engine_agent.engines.llama_cpp.test_real_engine import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    LIMIT_S,
    WHY,
    Cell,
    a_schema_is_kept,
    artifact,
    eventually,
    plan_of,
    running_cell,
    started,
)
from tests.engine_agent.engines.request_table import TABLE, outcome_of
from tests.engine_agent.engines.vllm.running_cell import CACHE
from tests.ports import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
__all__ = ["artifact"]

FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": WHY, "max_tokens": 4}),
    (CHAT, {"messages": WHY, "max_tokens": 4, "stream": True}),
    (COMPLETIONS, {"prompt": "Say why", "max_tokens": 3}),
    (COMPLETIONS, {"prompt": "Say why", "max_tokens": 3, "stream": True}),
    (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 12, "stop": ["a", "e"]}),
)


@pytest.fixture(scope="module")
def cell(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    install(CACHE, print)
    plan = plan_of(artifact, engine="triton", temperature=0.2, top_p=0.9)
    with running_cell(plan, tmp_path_factory.mktemp("longer-than-the-path-of-a-socket-" * 4)) as cell:
        yield cell


def test_it_serves_what_it_should_until_its_model_dies(cell: Cell, subtests: pytest.Subtests) -> None:
    for check in (
        it_was_unhealthy_while_it_loaded,
        it_serves_what_the_weights_know,
        every_token_is_counted,
        a_chat_streams_tokens,
        a_schema_is_kept,
        a_client_that_leaves_ends_its_request_and_its_tokens_are_known,
        what_it_lacks_has_the_error_of_its_api,
        its_own_api_is_closed,
        its_model_runs_in_the_environments_python,
        a_cell_that_drains_ends_what_it_has,
        a_dead_model_is_seen,
    ):
        with subtests.test(check.__name__):
            check(cell)


def counters(cell: Cell) -> dict[str, int]:
    """Triton's own count of requests, and the model's of tokens."""
    page = CLIENT.get(f"{cell.engine_url}/metrics").text
    found = re.findall(r"^(?:switchyard|nv)_(\w+)\{[^}]*\} ([0-9.e+]+)$", page, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


def counted(cell: Cell) -> dict[str, int]:
    """What the proxy counted."""
    rows = cell.status()["load"]["classes"].values()
    names = ("requests_total", "prompt_tokens_total", "completion_tokens_total", "in_flight")
    return {name: sum(row.get(name, 0) for row in rows) for name in names}


def it_was_unhealthy_while_it_loaded(cell: Cell) -> None:
    assert cell.seen == {503, 200}


def it_serves_what_the_weights_know(cell: Cell) -> None:
    found = cell.ask(COMPLETIONS, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert found["choices"][0]["text"].startswith(" Paris")
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 4
    assert [model["id"] for model in CLIENT.get(f"{cell.engine_url}/v1/models").json()["data"]] == ["tiny"]


def every_token_is_counted(cell: Cell) -> None:
    """The model's counters on Triton's page grow by what the proxy counted for requests of every form."""
    before, engine = counted(cell), counters(cell)
    for path, body in FORMS:
        answer = CLIENT.post(f"{cell.url}{path}", json={"model": "tiny", **body}, timeout=LIMIT_S)
        assert answer.status_code == 200, (path, answer.text)
    eventually(lambda: counted(cell)["in_flight"] == 0, "all requests have ended")
    after, grown = counted(cell), counters(cell)
    assert after["requests_total"] - before["requests_total"] == len(FORMS)
    assert grown["inference_request_success"] - engine["inference_request_success"] == len(FORMS)
    for name in ("prompt_tokens_total", "completion_tokens_total"):
        assert after[name] - before[name] == grown[name] - engine[name] > 0, name
    assert grown["steps_total"] > engine["steps_total"]


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


def a_client_that_leaves_ends_its_request_and_its_tokens_are_known(cell: Cell) -> None:
    before, engine = counted(cell), counters(cell)
    with CLIENT.stream("POST", f"{cell.url}{COMPLETIONS}", json={"model": "tiny", **ENDLESS}) as answer:
        next(answer.iter_lines())
    eventually(lambda: counted(cell)["completion_tokens_total"] > before["completion_tokens_total"], "it is counted")
    after, grown = counted(cell), counters(cell)
    for name in ("prompt_tokens_total", "completion_tokens_total"):
        assert after[name] - before[name] == grown[name] - engine[name] > 0, name
    assert after["completion_tokens_total"] - before["completion_tokens_total"] < 1900


def what_it_lacks_has_the_error_of_its_api(cell: Cell) -> None:
    error = cell.ask("/v1/embeddings", 404, input="x")["error"]
    assert (error["code"], error["param"]) == ("unsupported_model", "model")
    error = cell.ask(CHAT, 400, messages=WHY, logprobs=True)["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "logprobs")
    error = cell.ask(COMPLETIONS, 400, prompt="x " * 3000, max_tokens=2)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "nonsense"}}}
    error = cell.ask(CHAT, 400, messages=WHY, response_format=form)["error"]
    assert "unrecognized type nonsense" in error["message"]
    assert cell.status()["load"]["errors_total"] == 0


def its_own_api_is_closed(cell: Cell) -> None:
    """The parts that register memory, change models or write files."""
    url = f"http://127.0.0.1:{cell.node.port_base + ENGINE_ADMIN}/v2"
    assert CLIENT.get(f"{url}/health/ready").status_code == 200
    for path in ("logging", "trace/setting", "systemsharedmemory/status", "models/llm/config"):
        assert CLIENT.get(f"{url}/{path}").status_code == 403, path
    assert CLIENT.post(f"{url}/repository/models/llm/unload", json={}).status_code == 403


def its_model_runs_in_the_environments_python(cell: Cell) -> None:
    """The backend would take the host's, and packages that happen to be there."""
    packages = {found.path for found in model_process(cell).memory_maps() if "/site-packages/" in found.path}
    assert packages
    assert [path for path in packages if not path.startswith(f"{CACHE}/engines/triton/")] == []


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


def model_process(cell: Cell) -> psutil.Process:
    (server,) = psutil.Process(cell.engine.pid).children()
    (model,) = server.children()
    return model


def a_dead_model_is_seen(cell: Cell) -> None:
    model_process(cell).kill()
    eventually(lambda: not cell.status()["health"]["ok"], "the proxy sees it")
    assert cell.ask(COMPLETIONS, 503, prompt="x")["error"]["code"] == "engine_unhealthy"
    assert cell.engine.wait(LIMIT_S) == EXIT_CANNOT_SERVE


@pytest.mark.long
def test_no_request_of_the_table_stops_it_or_counts_against_the_cell(artifact: Artifact, tmp_path: Path) -> None:
    """Its outcomes differ from vLLM's: it takes or refuses other members."""
    install(CACHE, print)
    with running_cell(plan_of(artifact, engine="triton"), tmp_path) as cell:
        found = [asyncio.run(outcome_of(cell.node.port_base, row)) for row in TABLE]
        assert [(row, got) for row, got in zip(TABLE, found, strict=True) if got[0] >= 500] == []
        assert cell.engine.poll() is None
        assert cell.status()["load"]["errors_total"] == 0


@pytest.mark.long
def test_a_killed_launcher_takes_triton_and_the_model_with_it(artifact: Artifact, tmp_path: Path) -> None:
    install(CACHE, print)
    with running_cell(plan_of(artifact, engine="triton"), tmp_path) as cell:
        processes = [*psutil.Process(cell.engine.pid).children(), model_process(cell)]
        second, *_ = started(plan_of(artifact, engine="triton"), tmp_path, cell.node.port_base)
        assert second.wait(LIMIT_S) == EXIT_ADDRESS_IN_USE
        cell.engine.kill()
        gone, alive = psutil.wait_procs(processes, LIMIT_S)
        assert (len(gone), alive) == (2, [])


@pytest.mark.long
def test_a_context_beyond_the_models_is_refused_and_a_stopped_engine_leaves_nothing(
    artifact: Artifact, tmp_path: Path
) -> None:
    install(CACHE, print)
    base = free_ports(PORTS_PER_NODE)
    process, *_ = started(plan_of(artifact, context_length=9_000, engine="triton"), tmp_path, base)
    assert process.wait(LIMIT_S) == EXIT_CANNOT_SERVE
    assert "the model has a context of 8192 tokens" in (tmp_path / "engine.log").read_text()
    with running_cell(plan_of(artifact, engine="triton"), tmp_path) as cell:
        cell.engine.terminate()
        assert cell.engine.wait(LIMIT_S) == 0
        assert list(Path("/dev/shm").glob(f"switchyard-{cell.node.port_base + ENGINE_ADMIN}-*")) == []
