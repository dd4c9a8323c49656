"""The real engine, from the package's weights to streamed tokens and to its death; what it has cached; and the proxy
before it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_agent.protocol.messages import Artifact
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.cached_blocks import (
    tenants_find_their_own_prompts_only,
    the_index_is_what_the_engine_has_cached,
)
from tests.engine_agent.engines.vllm.proxied_engine import outcomes_of_the_table, proxy_controls_the_engine
from tests.engine_agent.engines.vllm.running_cell import (
    ANSWER_LIMIT_S,
    RunningCell,
    plan_of,
    running_cell,
    runtime_folder,
)

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]

DEATH_LIMIT_S = 90.0


@pytest.fixture
def engine(artifact: Artifact, tmp_path: Path) -> Iterator[RunningCell]:
    """With all layers of the model, started as an agent starts it."""
    with running_cell(plan_of(artifact), tmp_path / "logs", nodes=1) as engine:
        yield engine


def test_the_engine_serves_what_it_should_until_its_core_is_killed(
    engine: RunningCell, subtests: pytest.Subtests
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


def test_the_index_is_what_the_engine_has_cached_and_tenants_find_their_own_prompts_only(plain: RunningCell) -> None:
    the_index_is_what_the_engine_has_cached(plain)
    tenants_find_their_own_prompts_only(plain)


def test_the_proxy_controls_the_engine(plain: RunningCell) -> None:
    asyncio.run(proxy_controls_the_engine(plain.url))


def test_requests_have_the_outcomes_that_they_have_with_the_simulator(plain: RunningCell) -> None:
    found = asyncio.run(outcomes_of_the_table(plain.url))
    assert [(row, got) for row, got in found if got != tuple(row[2:])] == []


def greedy_text_is_what_the_weights_know(engine: RunningCell) -> None:
    assert engine.complete(prompt="The capital of France is", max_tokens=4)["text"].startswith(" Paris")


def a_chat_streams_tokens_and_ends_where_the_template_says(engine: RunningCell) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 30,
        "temperature": 0,
        "stream": True,
    }
    with CLIENT.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=ANSWER_LIMIT_S) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "The capital of France is Paris."
    assert choices[-1]["finish_reason"] == "stop"
    assert len(choices) > 2, "a busy front end sends several tokens at once, but not all"


def every_process_carries_the_nodes_id(engine: RunningCell) -> None:
    titles = [" ".join(part.cmdline()) for part in engine.parts(0)]
    assert len(titles) == 2
    assert [title for title in titles if engine.node(0) not in title] == []


def all_that_vllm_leaves_lying_about_is_in_one_folder(engine: RunningCell) -> None:
    assert list(runtime_folder(engine.node(0)).glob("vllm_dist_*"))


def when_its_core_is_killed_the_engine_is_unhealthy_and_ends(engine: RunningCell) -> None:
    core = next(part for part in engine.parts(0) if part.pid != engine.ranks[0].pid)
    core.kill()
    engine.wait_until(lambda: engine.health(0)[0] != 200, DEATH_LIMIT_S)
    engine.wait_until(lambda: engine.parts(0) == [], DEATH_LIMIT_S)
    assert not runtime_folder(engine.node(0)).exists()
