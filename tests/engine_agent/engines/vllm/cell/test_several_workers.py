"""Real cells with several workers on each node, or pipeline stages: the tokens of one process, until a worker dies."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_agent.engines.vllm.cell.member import EXIT_CELL_ENDED
from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import Artifact
from lab.fewer_layers import first_layers
from tests.engine_agent.engines.vllm.forks import Begin, EngineProcess
from tests.engine_agent.engines.vllm.running_cell import (
    CACHE,
    PROMPTS,
    TOKENS,
    RunningCell,
    padded_artifact,
    plan_of,
    running_cell,
)

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]

NOTICED_WITHIN_S = 90.0
"""Generous, for busy machines."""
HANG_S = 30.0
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lyon"]}, "trains": {"type": "boolean"}},
    "required": ["city", "trains"],
}
Tokens = list[list[int]]


def answers(engine: RunningCell) -> Tokens:
    """Token ids of four prompts one after the other, of eight together, and of an answer with a schema."""

    def asked(prompt: str) -> list[int]:
        return engine.tokens(prompt, TOKENS)

    single = [asked(prompt) for prompt in PROMPTS[:4]]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(asked, PROMPTS[4:12]))
    return [*single, *together, engine.tokens("As JSON:", 32, structured_outputs={"json": SCHEMA})]


@pytest.fixture(scope="module")
def of_one_process(plain: RunningCell) -> Tokens:
    found = answers(plain)
    assert len({tuple(each) for each in found}) > len(found) // 2
    return found


def further_worker(cell: RunningCell, rank: int) -> int:
    """Returns the pid of a node's second worker: a child of the follower, or of the leader's core, which is a child of
    its server."""
    parents = {part.pid: part.ppid() for part in cell.parts(rank)}
    own = cell.ranks[rank].pid
    owner = own if rank else next(pid for pid, parent in parents.items() if parent == own)
    return next(pid for pid, parent in parents.items() if parent == owner)


def is_over(cell: RunningCell, because: str) -> Callable[[], bool]:
    """Whether the leader's health says so."""
    return lambda: cell.health(0)[0] == 503 and because in cell.health(0)[1]


def leaves_nothing(cell: RunningCell, shared: set[str], nodes: int) -> None:
    cell.wait_until(lambda: [part for rank in range(nodes) for part in cell.parts(rank)] == [], NOTICED_WITHIN_S)
    assert shared & set(os.listdir("/dev/shm")) == set()


def test_two_nodes_of_two_workers_give_the_tokens_of_one_process_until_a_worker_dies(
    small: Artifact, forked: Begin, of_one_process: Tokens, tmp_path: Path
) -> None:
    def begin(_: int, *how: Any) -> EngineProcess:
        return forked(0, *how)  # without another import of vLLM: `test_real_cell` has ranks of different hash seeds

    with running_cell(plan_of(small, nodes=2, workers=2), tmp_path / "logs", begin=begin) as cell:
        shared = cell.shared_memory()
        assert answers(cell) == of_one_process
        died = further_worker(cell, 1)
        os.kill(died, signal.SIGKILL)
        reason = f"rank 1 ({cell.node(1)}) failed: worker of rank 3 (process {died}) died with SIGKILL"
        cell.wait_until(is_over(cell, reason), NOTICED_WITHIN_S)
        assert cell.ranks[1].wait(NOTICED_WITHIN_S) == EXIT_CELL_ENDED
        assert cell.last_words(1) == f"the cell has ended: {reason}"
        leaves_nothing(cell, shared, 2)
        assert cell.last_words(0).endswith(reason)


@pytest.mark.parametrize(
    ("nodes", "layout", "rank", "how", "because"),
    [
        (2, {"workers": 2, "stages": 2}, 0, signal.SIGKILL, "failed: worker of rank 1 (process {}) died with SIGKILL"),
        (2, {"workers": 2, "stages": 4}, 1, signal.SIGSTOP, " did not finish step "),
        (2, {"stages": 2}, None, signal.SIGKILL, "is gone"),
        (3, {"stages": 3}, None, signal.SIGKILL, "is gone"),
    ],
    ids=["2 x 2, a stage per node", "2 x 2, two stages on a node", "2 x 1, two stages", "3 x 1, three stages"],
)
def test_pipeline_stages_give_the_tokens_of_one_process_until_one_dies_or_hangs(
    small: Artifact,
    forked: Begin,
    of_one_process: Tokens,
    tmp_path: Path,
    nodes: int,
    layout: dict[str, Any],
    rank: int | None,
    how: signal.Signals,
    because: str,
) -> None:
    plan = plan_of(small, nodes=nodes, **layout)
    with running_cell(plan, tmp_path / "logs", nodes=nodes, hang_s=HANG_S, begin=forked) as cell:
        shared = cell.shared_memory()
        assert answers(cell) == of_one_process
        if rank is None:
            cell.kill(nodes - 1, how)
        else:
            died = further_worker(cell, rank)
            os.kill(died, how)
            because = because.format(died)
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(cell.complete, prompt="Once", max_tokens=8)
            cell.wait_until(is_over(cell, because), HANG_S + NOTICED_WITHIN_S)
            assert asked.exception(NOTICED_WITHIN_S) is not None
        leaves_nothing(cell, shared, nodes)


def test_three_nodes_give_the_tokens_of_one_process(forked: Begin, of_one_process: Tokens, tmp_path: Path) -> None:
    """With the model's own heads, which three ranks can share."""
    own_heads = first_layers(padded_artifact(install(CACHE, print), ranks=3), tmp_path / "model")
    with running_cell(plan_of(own_heads, nodes=3), tmp_path / "logs", nodes=3, begin=forked) as cell:
        assert answers(cell) == of_one_process
