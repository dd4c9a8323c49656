"""A step with a worker that keeps the least of the contract, that of Neuron's plugin, and what measures steps."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from engine_agent.engines.vllm import vllm_versions
from engine_agent.engines.vllm.steps import SortedSet, Step, in_one_order, measure_steps, take_step

IDS = {f"request-{number}" for number in range(50)}


@dataclass
class Scheduled:
    """As much of vLLM's `SchedulerOutput` as a step needs."""

    total_num_scheduled_tokens: int = 1
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None


class Worker:
    """Returns nothing from `execute_model`, and raises where there is nothing to sample."""

    def __init__(self, *, is_driver: bool) -> None:
        self._is_driver, self._computed = is_driver, False

    def execute_model(self, scheduled: Scheduled) -> str | None:
        self._computed = scheduled.total_num_scheduled_tokens > 0
        return "empty" if self._is_driver and not self._computed else None

    def sample_tokens(self, mask: str) -> str:
        if not self._computed:
            raise RuntimeError("sample_tokens() called without prior execute_model(). Logits must be cached first.")
        return f"tokens under {mask}"


@pytest.mark.parametrize("is_driver", [True, False])
def test_a_step_is_sampled_on_every_rank(is_driver: bool) -> None:
    assert take_step(Worker(is_driver=is_driver), Step(Scheduled(), "mask")) == "tokens under mask"


@pytest.mark.parametrize(("is_driver", "returned"), [(True, "empty"), (False, None)])
def test_where_nothing_was_scheduled_nothing_is_sampled(is_driver: bool, returned: str | None) -> None:
    assert take_step(Worker(is_driver=is_driver), Step(Scheduled(0, {"over"}), None)) == returned


def test_what_pools_is_not_sampled() -> None:
    class Pools(Worker):
        def execute_model(self, scheduled: Scheduled) -> str:
            return "vectors"

    assert take_step(Pools(is_driver=False), Step(Scheduled(), None)) == "vectors"


def test_every_process_walks_what_was_scheduled_in_one_order_and_finds_the_same_in_it() -> None:
    scheduled = Scheduled(0, set(IDS))
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


def test_collectives_of_an_eager_model_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = SimpleNamespace(all_reduce=str.upper)
    communicator = SimpleNamespace(dist_module=gloo)
    monkeypatch.setattr(vllm_versions, "cpu_communicator", lambda: communicator)

    def configuration(*, enforce_eager: bool) -> Any:
        return SimpleNamespace(model_config=SimpleNamespace(enforce_eager=enforce_eager))

    assert measure_steps(configuration(enforce_eager=False)) is None
    assert communicator.dist_module is gloo

    steps = measure_steps(configuration(enforce_eager=True))
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
    assert measure_steps(SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))) is None
