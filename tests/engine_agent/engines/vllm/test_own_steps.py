"""A rank's own computing is what is left of its steps without the time in collectives; prompts do not count."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.vllm.adapter import VllmAdapter
from engine_agent.engines.vllm.middleware import StepsPage
from engine_agent.engines.vllm.steps import (
    STEPS_FILE,
    STEPS_PATH,
    OwnSteps,
    TimedCollectives,
    decode_sequences,
    written_steps,
)
from engine_agent.protocol.messages import StepTimes
from tests.engine_agent.engines.neuron.orders import assignment, node


@dataclass
class Scheduled:
    """As much of vLLM's `SchedulerOutput` as is looked at."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[str] = field(default_factory=list)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Clock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


class Collectives:
    """Takes half a second for each sum, as where others come late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def all_reduce(self, tensor: str) -> str:
        self._clock.at_s += 0.5
        return tensor.upper()


@pytest.mark.parametrize(
    ("scheduled", "sequences"),
    [
        (Scheduled({"a": 1, "b": 1, "c": 1}), 3),
        (Scheduled({}), 0),
        (Scheduled({"a": 1, "b": 40}), 0),
        (Scheduled({"a": 1}, scheduled_new_reqs=["a"]), 0),
        (Scheduled({"a": 4, "b": 1}, scheduled_spec_decode_tokens={"a": [1, 2, 3]}), 2),
    ],
)
def test_steps_that_only_decode_are_counted(scheduled: Scheduled, sequences: int) -> None:
    assert decode_sequences(scheduled) == sequences


def test_waiting_for_others_is_no_computing(tmp_path: Path) -> None:
    clock = Clock()
    steps = OwnSteps(tmp_path, clock)
    collectives = TimedCollectives(Collectives(clock), steps)
    for _ in range(2):
        with steps.step(Scheduled({"a": 1, "b": 1})):
            clock.at_s += 0.1
            assert collectives.all_reduce("x") == "X"
            clock.at_s += 0.2
    with steps.step(Scheduled({"a": 30})):
        clock.at_s += 9.0
    clock.at_s += 1.0
    with steps.step(Scheduled({"a": 1})):
        clock.at_s += 0.05
    found = msgspec.json.decode(written_steps(tmp_path) or b"", type=StepTimes)
    assert found.steps == {1: 2, 0: 1}
    assert found.compute_ms == {1: pytest.approx(600.0), 0: pytest.approx(50.0)}
    assert [path.name for path in tmp_path.iterdir()] == ["steps.json"]


def test_a_step_that_fails_is_not_counted_and_a_full_disk_costs_nothing(tmp_path: Path) -> None:
    steps = OwnSteps(tmp_path / "missing", Clock())

    def fail() -> None:
        with steps.step(Scheduled({"a": 1})):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        fail()
    steps.note(1, 0.1)
    assert written_steps(tmp_path / "missing") is None


def test_a_leader_answers_on_its_api_and_a_follower_on_its_administration_port() -> None:
    leader, follower = (assignment(rank, (), nodes=2) for rank in range(2))
    assert VllmAdapter().steps_url(leader, node(0)) == "http://127.0.0.1:9403/switchyard/steps"
    assert VllmAdapter().steps_url(follower, node(1)) == "http://127.0.0.1:9404/steps"


def test_the_page_says_what_was_measured_and_lets_all_else_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_agent.engines.vllm.middleware.runtime_folder", lambda: tmp_path)
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    page, sent = StepsPage(app), []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    def get(path: str) -> None:
        asyncio.run(page({"type": "http", "path": path}, receive, send))

    get("/v1/models")
    get(STEPS_PATH)
    (tmp_path / STEPS_FILE).write_bytes(b'{"steps":{},"compute_ms":{}}')
    get(STEPS_PATH)
    assert passed == ["/v1/models"]
    assert [message["status"] for message in sent[::2]] == [404, 200]
    assert sent[3]["body"] == b'{"steps":{},"compute_ms":{}}'
