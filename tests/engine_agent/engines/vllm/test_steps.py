"""A rank's computing time is its steps without the time in collectives, and excludes prompts; steps run on workers with
the minimal contract, that of Neuron's plugin."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine_agent.engines.vllm import vllm_versions
from engine_agent.engines.vllm.adapter import VllmAdapter
from engine_agent.engines.vllm.middleware import StepsPage
from engine_agent.engines.vllm.steps import (
    STEPS_FILE,
    STEPS_PATH,
    OwnSteps,
    SortedSet,
    Step,
    TimedCollectives,
    decode_sequences,
    in_one_order,
    measure_steps,
    take_step,
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


def test_a_node_is_as_slow_as_its_slowest_worker(tmp_path: Path) -> None:
    OwnSteps(tmp_path, Clock()).note(1, 0.010)
    slow = OwnSteps(tmp_path, Clock(), place=1)
    slow.note(1, 0.030)
    fast = OwnSteps(tmp_path, Clock(), place=2)
    fast.note(2, 0.001)
    found = msgspec.json.decode(written_steps(tmp_path) or b"", type=StepTimes)
    assert (found.steps, found.compute_ms) == ({0: 1}, {0: 30.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps-1.json", "steps-2.json", "steps.json"]


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


IDS = {f"request-{number}" for number in range(50)}


@dataclass
class ScheduledStep:
    """As much of vLLM's `SchedulerOutput` as a step needs."""

    total_num_scheduled_tokens: int = 1
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None


class Worker:
    """Returns nothing from `execute_model`, and raises where there is nothing to sample."""

    def __init__(self, *, is_driver: bool) -> None:
        self._is_driver, self._computed = is_driver, False

    def execute_model(self, scheduled: ScheduledStep) -> str | None:
        self._computed = scheduled.total_num_scheduled_tokens > 0
        return "empty" if self._is_driver and not self._computed else None

    def sample_tokens(self, mask: str) -> str:
        if not self._computed:
            raise RuntimeError("sample_tokens() called without prior execute_model(). Logits must be cached first.")
        return f"tokens under {mask}"


@pytest.mark.parametrize("is_driver", [True, False])
def test_a_step_is_sampled_on_every_rank(is_driver: bool) -> None:
    assert take_step(Worker(is_driver=is_driver), Step(ScheduledStep(), "mask")) == "tokens under mask"


@pytest.mark.parametrize(("is_driver", "returned"), [(True, "empty"), (False, None)])
def test_where_nothing_was_scheduled_nothing_is_sampled(is_driver: bool, returned: str | None) -> None:
    assert take_step(Worker(is_driver=is_driver), Step(ScheduledStep(0, {"over"}), None)) == returned


def test_what_pools_is_not_sampled() -> None:
    class Pools(Worker):
        def execute_model(self, scheduled: ScheduledStep) -> str:
            return "vectors"

    assert take_step(Pools(is_driver=False), Step(ScheduledStep(), None)) == "vectors"


def test_every_process_walks_what_was_scheduled_in_one_order_and_finds_the_same_in_it() -> None:
    scheduled = ScheduledStep(0, set(IDS))
    in_one_order(scheduled)
    sent = pickle.dumps(scheduled, pickle.HIGHEST_PROTOCOL)
    ids: Any = pickle.loads(sent).finished_req_ids  # noqa: S301  (our own)
    assert list(ids) == sorted(IDS)
    assert ids == IDS
    assert "request-7" in ids
    assert ids - {"request-7"} == IDS - {"request-7"}
    assert scheduled.preempted_req_ids is None


@pytest.mark.processes
def test_two_processes_that_hash_texts_differently_walk_alike() -> None:
    script = "import pickle, sys; print(*pickle.loads(sys.stdin.buffer.read()), sep='\\n')"

    def walked(ids: set[str], seed: str) -> list[str]:
        run = subprocess.run(
            [sys.executable, "-c", script], input=pickle.dumps(ids), env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        return run.stdout.decode().split()

    assert walked(set(IDS), "1") != walked(set(IDS), "2")
    assert walked(SortedSet(IDS), "1") == walked(SortedSet(IDS), "2")


def configuration(*, enforce_eager: bool = True, stages: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=enforce_eager),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


def test_collectives_of_an_eager_model_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = SimpleNamespace(all_reduce=str.upper)
    communicator = SimpleNamespace(dist_module=gloo)
    monkeypatch.setattr(vllm_versions, "cpu_communicator", lambda: communicator)

    assert measure_steps(configuration(enforce_eager=False)) is None
    assert measure_steps(configuration(stages=2)) is None
    assert communicator.dist_module is gloo

    steps = measure_steps(configuration())
    assert steps is not None
    waited: list[Any] = []

    def waiting(call: Callable[[str], str]) -> Callable[[str], str]:
        waited.append(call)
        return call

    monkeypatch.setattr(steps, "waiting", waiting)
    assert communicator.dist_module.all_reduce("x") == "X"
    assert waited == [gloo.all_reduce]


def test_steps_of_a_device_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_versions, "cpu_communicator", lambda: None)
    assert measure_steps(configuration()) is None
