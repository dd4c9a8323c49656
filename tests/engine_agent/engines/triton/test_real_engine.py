"""Real Triton with its Python backend behind the real cell proxy, both by the agent's command lines, from a version to
its death: one start for the file."""

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine_agent.engines.llama_cpp.serve import EXIT_ADDRESS_IN_USE, EXIT_CANNOT_SERVE
from engine_agent.engines.triton.environment import install
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.ports import ENGINE_ADMIN, PORTS_PER_NODE
from tests.asking import CLIENT
from tests.engine_agent.engines.one_node_cell import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    FORMS,
    LIMIT_S,
    WHY,
    Cell,
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
from tests.engine_agent.engines.vllm.running_cell import CACHE
from tests.ports import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
__all__ = ["artifact"]


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


def every_token_is_counted(cell: Cell) -> None:
    """The model's counters on Triton's page grow by what the proxy counted for requests of every form."""
    before, engine = cell.counted(), counters(cell)
    answer_all(cell, FORMS)
    after, grown = cell.counted(), counters(cell)
    assert after["requests_total"] - before["requests_total"] == len(FORMS)
    assert grown["inference_request_success"] - engine["inference_request_success"] == len(FORMS)
    for name in ("prompt_tokens_total", "completion_tokens_total"):
        assert after[name] - before[name] == grown[name] - engine[name] > 0, name
    assert grown["steps_total"] > engine["steps_total"]


def a_client_that_leaves_ends_its_request_and_its_tokens_are_known(cell: Cell) -> None:
    before, engine = cell.counted(), counters(cell)
    with CLIENT.stream("POST", f"{cell.url}{COMPLETIONS}", json={"model": "tiny", **ENDLESS}) as answer:
        next(answer.iter_lines())
    eventually(lambda: cell.counted()["completion_tokens_total"] > before["completion_tokens_total"], "it is counted")
    after, grown = cell.counted(), counters(cell)
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
    install(CACHE, print)
    with running_cell(plan_of(artifact, engine="triton"), tmp_path) as cell:
        no_request_of_the_table_stops_it_or_counts_against_it(cell)


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
