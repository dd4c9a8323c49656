"""Leader and follower with vLLM's scheduler and executor, on workers that keep the contract of Neuron's plugin.

The plugin itself needs a device. `neuron_like` has the differences from other platforms.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.engines.vllm.cell.member import MEMBER_VARIABLE, Member
from engine_agent.engines.vllm.environment import install
from engine_agent.node.identity import throwaway_certificate
from tests.engine_agent.engines.vllm.cell.members import follower, leader
from tests.engine_agent.engines.vllm.cell.neuron_like_tokens import STORE_VARIABLE, continuation
from tests.engine_agent.engines.vllm.running_cell import CACHE, ROOT
from tests.ports import free_ports

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]

START_LIMIT_S = 600.0
PLATFORM = "tests.engine_agent.engines.vllm.cell.neuron_like_platform"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": 997,
}
Wave = dict[str, tuple[list[int], int]]


class NeuronLikeCell:
    """Two ranks with different hash seeds, like processes that are started separately."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._folder, self._python = folder, install(CACHE, print)
        self._certificate = throwaway_certificate()
        plugin = folder / "neuron_like-1.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: neuron-like\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text(f"[vllm.platform_plugins]\nneuron_like = {PLATFORM}:register\n")
        (folder / "config.json").write_text(json.dumps(MODEL))
        port = free_ports(2)
        self._store = port + 1
        first = leader(port, join_timeout_s=START_LIMIT_S)
        self.leader, self.follower = (self._start(each, ends) for each in (first, follower(first)))
        self._line()

    def _start(self, member: Member, ends: ExitStack) -> "subprocess.Popen[str]":
        role = "follower" if member.rank else "leader"
        runtime = self._folder / role
        runtime.mkdir()
        environment = {
            MEMBER_VARIABLE: replace(member, runtime=str(runtime)).to_variable(),
            CELL_SECRET_VARIABLE: "s3cret",
            CELL_CERTIFICATE_VARIABLE: self._certificate,
            STORE_VARIABLE: f"127.0.0.1:{self._store}",
            "PYTHONPATH": f"{ROOT}:{self._folder}",
            "PYTHONHASHSEED": str(member.rank + 1),
            "VLLM_PLUGINS": "neuron_like",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        log = ends.enter_context((self._folder / f"{role}.log").open("w"))
        process = subprocess.Popen(
            [str(self._python), "-m", "tests.engine_agent.engines.vllm.cell.neuron_like", role, str(self._folder)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        ends.enter_context(process)
        ends.callback(process.kill)
        return process

    def ask(self, wave: Wave) -> dict[str, list[int]]:
        """Returns the answers to requests that arrive together."""
        stdin = _pipe(self.leader.stdin)
        stdin.write(json.dumps(wave) + "\n")
        stdin.flush()
        return self._line()

    def end(self) -> str:
        """Stops the leader; returns the follower's output."""
        _pipe(self.leader.stdin).close()
        said = _pipe(self.follower.stdout).read()
        assert self.follower.wait(START_LIMIT_S) == 0, self.log("follower")
        return said

    def _line(self) -> dict[str, list[int]]:
        for line in _pipe(self.leader.stdout):
            if line.startswith("{"):
                answers: dict[str, list[int]] = json.loads(line)
                return answers
        raise AssertionError(f"the leader ended:\n{self.log('leader')}\n--- follower\n{self.log('follower')}")

    def log(self, role: str) -> str:
        return (self._folder / f"{role}.log").read_text()[-3000:]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NeuronLikeCell]:
    with ExitStack() as ends:
        yield NeuronLikeCell(tmp_path_factory.mktemp("neuron-like"), ends)


def wave(number: int, lengths: tuple[int, ...]) -> Wave:
    """Requests of one moment; those of the same length end in one step."""
    return {f"{number}-{index}": ([7 * number + index, 11, 13], length) for index, length in enumerate(lengths)}


def expected(asked: Wave) -> dict[str, list[int]]:
    return {name: continuation(prompt, length) for name, (prompt, length) in asked.items()}


def test_a_cell_answers_a_second_request_and_the_right_tokens_whichever_requests_end_together(
    cell: NeuronLikeCell, subtests: pytest.Subtests
) -> None:
    with subtests.test("the follower samples nothing where nothing was scheduled"):
        for number in range(2):
            assert cell.ask(wave(number, (3,))) == expected(wave(number, (3,)))
    with subtests.test("requests that end in one step leave ranks with the same places"):
        for number in range(2, 20):
            asked = wave(number, (3, 3, 5, 5, 3, 3, 5))
            assert cell.ask(asked) == expected(asked)
    with subtests.test("the follower was told that the cell is ready, and ends with it"):
        assert "ready: rank 1 (n-00000001) follows the leader" in cell.end()
