"""Real llama.cpp behind the real cell proxy, both by the agent's command lines, from a version to its death: one start
for the file, one more for the engine that sleeps."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_agent.engines.llama_cpp.serve import EXIT_ADDRESS_IN_USE, EXIT_CANNOT_SERVE
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.ports import PORTS_PER_NODE
from tests.asking import CLIENT
from tests.engine_agent.engines.one_node_cell import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    LIMIT_S,
    WHY,
    Cell,
    Form,
    a_cell_that_drains_ends_what_it_has,
    a_chat_streams_tokens,
    a_schema_is_kept,
    answer_all,
    artifact,
    eventually,
    it_serves_what_the_weights_know,
    it_was_unhealthy_while_it_loaded,
    no_request_of_the_table_stops_it_or_counts_against_it,
    plan_of,
    running_cell,
    started,
)
from tests.engine_agent.engines.one_node_cell import FORMS as EVERY_ENGINES_FORMS
from tests.ports import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
__all__ = ["artifact"]

FORMS: tuple[Form, ...] = (
    *EVERY_ENGINES_FORMS,
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
        a_schema_that_it_would_ignore_is_refused,
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


def a_schema_that_it_would_ignore_is_refused(cell: Cell) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object"}}}
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


def counter(cell: Cell, name: str) -> int:
    page = CLIENT.get(f"{cell.engine_url}/metrics").text
    (line,) = (line for line in page.splitlines() if line.startswith(f"llamacpp:{name} "))
    return int(float(line.rpartition(" ")[2]))


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
            return counter(cell, "requests_processing") == 1

    assert any(leaves() for _ in range(10))
    eventually(lambda: counter(cell, "requests_processing") == 0, "the slot is free")


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
    eventually(lambda: counter(cell, "requests_processing") == 0, "nobody's answer goes on")


def every_token_is_counted(cell: Cell) -> None:
    """The engine's counters grow by what the proxy counted for requests of every form."""
    before = cell.counted()
    prompt = counter(cell, "prompt_tokens_total") + counter(cell, "prompt_tokens_cached_total")
    completion = counter(cell, "tokens_predicted_total")
    answer_all(cell, FORMS)
    after = cell.counted()
    grown = counter(cell, "prompt_tokens_total") + counter(cell, "prompt_tokens_cached_total") - prompt
    assert after["requests_total"] - before["requests_total"] == len(FORMS)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == grown
    assert (
        after["completion_tokens_total"] - before["completion_tokens_total"]
        == counter(cell, "tokens_predicted_total") - completion
    )


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
    with running_cell(plan_of(artifact), tmp_path) as cell:
        no_request_of_the_table_stops_it_or_counts_against_it(cell)


@pytest.mark.long
def test_a_context_beyond_the_models_is_refused_and_so_is_a_taken_port(artifact: Artifact, tmp_path: Path) -> None:
    process, *_ = started(plan_of(artifact, context_length=100_000), tmp_path, free_ports(PORTS_PER_NODE))
    assert process.wait(LIMIT_S) == EXIT_CANNOT_SERVE
    assert "the model has a context of 8192 tokens" in (tmp_path / "engine.log").read_text()
    with running_cell(plan_of(artifact), tmp_path) as cell:
        second, *_ = started(plan_of(artifact), tmp_path, cell.node.port_base)
        assert second.wait(LIMIT_S) == EXIT_ADDRESS_IN_USE
