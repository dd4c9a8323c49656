"""What differs between versions of vLLM, on stand-ins that have what each version has: only 0.32 can be had here."""

from typing import Any

import pytest

from engine_agent.engines.vllm.cell import vllm_versions


class Platform:
    """As in every version: it has None for what it lacks."""

    def __getattr__(self, name: str) -> Any:
        return None


class PlatformOf032(Platform):
    @classmethod
    def update_block_size_for_backend(cls, config: dict[str, int]) -> None:
        config["block_size"] = 32


class WrapperOf013:
    def __init__(self, vllm_config: Any, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.made = (vllm_config, rpc_rank, global_rank)


class WrapperOf032:
    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.made = (None, rpc_rank, global_rank)


class ExecutorOf016:
    def initialize_from_config(self, configs: Any) -> None:
        """Warms the workers up, too."""


class ExecutorOf032(ExecutorOf016):
    def compile_or_warm_up_model(self) -> None:
        """Comes after it."""


def test_a_platform_without_a_say_in_block_sizes_is_not_asked() -> None:
    config: dict[str, int] = {}
    vllm_versions.update_block_size(Platform(), config)
    assert config == {}
    vllm_versions.update_block_size(PlatformOf032(), config)
    assert config == {"block_size": 32}


@pytest.mark.parametrize(("wrapper", "given"), [(WrapperOf013, "configuration"), (WrapperOf032, None)])
def test_a_worker_is_made_with_what_its_version_takes(wrapper: Any, given: str | None) -> None:
    assert vllm_versions.new_worker(wrapper, "configuration", 3).made == (given, 0, 3)


def test_the_last_call_before_serving_is_known_by_what_the_executor_has() -> None:
    assert not vllm_versions.warms_up_by_method(ExecutorOf016)
    assert vllm_versions.warms_up_by_method(ExecutorOf032)


def test_a_worker_without_dummy_batches_is_known() -> None:
    assert not vllm_versions.has_dummy_batch(Platform())
    assert not vllm_versions.has_dummy_batch(object())
