"""One engine for all that can be asked of one: a start takes a quarter of a minute on two idle cores."""

from collections.abc import Iterator

import pytest

from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import Artifact
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
def engine(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCell]:
    """Of one process, which takes one request at a time, the most urgent first, as vLLM's own scheduler has them."""
    plan = plan_of(artifact, max_num_seqs=1, scheduling_policy="priority", batch_prompt_tokens=0)
    with running_cell(plan, tmp_path_factory.mktemp("one") / "logs", nodes=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def texts(engine: RunningCell) -> dict[str, str]:
    """What one process makes of the prompts, by prompt."""
    return engine.texts(PROMPTS, TOKENS)
