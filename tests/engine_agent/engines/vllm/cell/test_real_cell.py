"""One real replica over two processes: the same tokens as from one, and a named end whatever goes wrong.

A start takes a quarter of a minute, so every start is used for all that can be asked of it before it ends.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from engine_agent.engines.vllm.cell.member import EXIT_CELL_ENDED
from engine_agent.protocol.messages import Artifact
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.forks import Begin
from tests.engine_agent.engines.vllm.running_cell import (
    ANSWER_LIMIT_S,
    PROMPTS,
    TOKENS,
    RunningCell,
    plan_of,
    running_cell,
)

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]

NOTICED_WITHIN_S = 90.0
"""Generous, for busy machines: about 8 s with the limit of 8 s, 0.1 s after a kill."""
HANG_S = 30.0
"""A step takes a hundredth of a second, and many seconds where busy processes share the cores."""
NGRAM = {"method": "ngram", "tokens": 3, "lookup_max": 3, "lookup_min": 1}


def streaming(cell: RunningCell) -> "Stream":
    stream = Stream(cell)
    cell.wait_until(lambda: len(stream.lines) > 2, NOTICED_WITHIN_S)
    return stream


class Stream:
    """A client that reads a long answer, in a thread."""

    def __init__(self, cell: RunningCell) -> None:
        self._url = cell.url
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        asked = {"model": "smollm2", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        try:
            with CLIENT.stream("POST", f"{self._url}/v1/completions", json=asked, timeout=ANSWER_LIMIT_S) as response:
                self.lines.extend(line for line in response.iter_lines() if line)
        except httpx.TransportError as error:
            self.lines.append(str(error))

    def error(self) -> str:
        self.thread.join(NOTICED_WITHIN_S)
        assert not self.thread.is_alive()
        return next(line for line in self.lines if line.startswith('data: {"error"'))


def is_over(cell: RunningCell, because: str) -> Callable[[], bool]:
    """Whether the leader's health says so."""
    return lambda: cell.health(0)[0] == 503 and because in cell.health(0)[1]


def leaves_nothing(cell: RunningCell, shared: set[str], *ranks: int) -> None:
    cell.wait_until(lambda: [part for rank in ranks for part in cell.parts(rank)] == [], NOTICED_WITHIN_S)
    assert shared & set(os.listdir("/dev/shm")) == set()


def test_two_processes_give_the_text_of_one_with_speculation_until_a_follower_hangs(
    small: Artifact, forked: Begin, texts: dict[str, str], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """That a follower is killed, `tests/scenarios/test_real_inference.py` does to a whole fleet."""
    plan = plan_of(small, nodes=2, speculation=NGRAM, scheduling_policy="priority", batch_prompt_tokens=16)
    with running_cell(plan, tmp_path / "logs", hang_s=HANG_S, begin=forked) as cell:
        shared = cell.shared_memory()
        with subtests.test("greedy texts are the same, token by token, and some drafts were right"):
            assert cell.texts(PROMPTS, TOKENS) == texts
            assert cell.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
        with subtests.test("each worker's gloo groups share a thread"):
            assert [cell.threads(rank).count("gloo_tcp_loop") for rank in (0, 1)] == [1, 1]
        with subtests.test("outputs can be structured"):
            answer = cell.complete(prompt="Paris is", max_tokens=8, structured_outputs={"choice": ["small", "large"]})
            assert answer["text"] in {"small", "large"}
        with subtests.test("a follower that stands still is named"):
            stream = streaming(cell)
            cell.kill(1, signal.SIGSTOP)
            cell.wait_until(is_over(cell, "rank 1"), HANG_S + NOTICED_WITHIN_S)
            assert stream.error()
            leaves_nothing(cell, shared, 0)
        with subtests.test("a follower does not outlive its leader, and says why it ends"):
            cell.kill(1, signal.SIGCONT)
            assert cell.ranks[1].wait(NOTICED_WITHIN_S) == EXIT_CELL_ENDED
            leaves_nothing(cell, shared, 0, 1)
            assert "the leader ended the cell: rank 1" in cell.last_words(1)
