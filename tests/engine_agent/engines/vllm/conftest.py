"""Engines that tests share, and reference texts."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import Artifact
from lab.fewer_layers import first_layers
from tests.engine_agent.engines.vllm.forks import Begin, ForkServers
from tests.engine_agent.engines.vllm.running_cell import (
    CACHE,
    PROMPTS,
    TOKENS,
    RunningCell,
    padded_artifact,
    plan_of,
    running_cell,
)


@pytest.fixture(scope="session")
def artifact() -> Artifact:
    return padded_artifact(install(CACHE, print))


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServers]:
    with ForkServers() as servers:
        yield servers


@pytest.fixture(scope="session")
def forked(fork_servers: ForkServers) -> Begin:
    return fork_servers.start


@pytest.fixture(scope="session")
def small(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The engine of most tests: a quarter of the model's layers."""
    return first_layers(artifact, tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def plain(small: Artifact, forked: Begin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """One process that takes one request at a time, the most urgent first, like vLLM's scheduler."""
    tools: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    plan = plan_of(small, max_num_seqs=1, scheduling_policy="priority", batch_prompt_tokens=0, **tools)
    with running_cell(plan, tmp_path_factory.mktemp("plain") / "logs", nodes=1, begin=forked) as engine:
        yield engine


@pytest.fixture(scope="session")
def texts(plain: RunningCell) -> dict[str, str]:
    """The texts of one process, by prompt."""
    made = plain.texts(PROMPTS, TOKENS)
    assert len(set(made.values())) > len(PROMPTS) // 2, made
    return made
