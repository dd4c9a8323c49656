"""Differences between versions of vLLM, on stand-ins for each version: only 0.32 can be installed here."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_agent.engines.vllm import vllm_versions


class Platform:
    """As in every version: returns None for missing attributes."""

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
    def initialize_from_config(self, configs: Any) -> None: ...


class ExecutorOf032(ExecutorOf016):
    def compile_or_warm_up_model(self) -> None: ...


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


class RequestOf016:
    def __init__(self) -> None:
        self.priority = self.request_id = self.status = self.num_computed_tokens = self.num_output_placeholders = 0
        self.num_tokens_with_spec = self.arrival_time = 0


class RequestOf032(RequestOf016):
    def __init__(self) -> None:
        super().__init__()
        self.priority = self.request_id = self.status = self.num_computed_tokens = self.num_output_placeholders = 0
        self.num_tokens_with_spec = self.arrival_time = self.is_prefill_chunk = self.next_decode_eligible_step = 0


class SchedulerOf016:
    def __init__(self) -> None:
        self.running = self.waiting = self.max_num_scheduled_tokens = 0


class SchedulerOf032(SchedulerOf016):
    def __init__(self) -> None:
        super().__init__()
        self.running = self.waiting = self.max_num_scheduled_tokens = 0
        self.requires_kv_delivery = self.current_step = self.kv_holding_waiting = self.max_num_active_reqs = 0

    def _is_blocked_waiting_status(self, status: int) -> bool:
        return False

    def _preempt_request(self, request: int) -> None: ...

    def _request_blocks_can_be_freed(self, request: int) -> bool:
        return True


def configuration(**stated: Any) -> Any:
    scheduler = {"policy": "priority", "enable_chunked_prefill": True, "disable_chunked_mm_input": False} | stated
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**scheduler),
        cache_config=SimpleNamespace(mamba_cache_mode="align"),
        model_config=SimpleNamespace(supports_multimodal_inputs=True),
    )


@pytest.mark.parametrize(
    ("kinds", "stated", "mamba", "why"),
    [
        ((SchedulerOf032, RequestOf032), {}, False, ""),
        (
            (SchedulerOf016, RequestOf016),
            {},
            False,
            "the scheduler of this vLLM has no current_step, kv_holding_waiting, max_num_active_reqs, "
            "requires_kv_delivery, _is_blocked_waiting_status, _preempt_request, _request_blocks_can_be_freed, "
            "Request.is_prefill_chunk, Request.next_decode_eligible_step",
        ),
        ((SchedulerOf032, RequestOf032), {"policy": "fcfs"}, False, "it does not schedule by priority"),
        ((SchedulerOf032, RequestOf032), {"enable_chunked_prefill": False}, False, "chunked prefill is off"),
        ((SchedulerOf032, RequestOf032), {"disable_chunked_mm_input": True}, False, "parts of a prompt may not be cut"),
        ((SchedulerOf032, RequestOf032), {}, True, "the model's prompts are read in whole blocks"),
    ],
)
def test_a_scheduler_that_cannot_limit_batch_prompts_is_told_by_what_it_lacks(
    kinds: tuple[type[Any], type[Any]], stated: dict[str, Any], mamba: bool, why: str
) -> None:
    scheduler, request = kinds
    cache = SimpleNamespace(has_mamba_layers=mamba)
    assert vllm_versions.why_no_class_order(configuration(**stated), cache, scheduler, request) == why


class OwnFunction:
    """Of vLLM's backend."""

    def __init__(self) -> None:
        self.loaded_for = ""

    def finalize_loading(self, config: str) -> None:
        self.loaded_for = config


def test_code_of_torchs_own_backend_is_loaded_as_that_of_vllms() -> None:
    def plain() -> int:
        return 7

    compiled: list[Any] = [plain, own := OwnFunction()]
    compiler = SimpleNamespace(
        load_compiled_function=lambda at: SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=compiled[at]))
    )
    for _ in range(2):
        vllm_versions.load_plain_compiled_code(compiler)
    for at, function in enumerate(compiled):
        loaded = compiler.load_compiled_function(at)._artifacts.compiled_fn
        loaded.finalize_loading("config")
        assert loaded is function
    assert (plain(), own.loaded_for) == (7, "config")
    vllm_versions.load_plain_compiled_code(before := SimpleNamespace())
    assert vars(before) == {}


def test_all_gloo_groups_of_a_process_use_the_device_of_the_first() -> None:
    class Options:
        _devices: tuple[object, ...] = ()
        _timeout = 0.0

    class Group:
        options = Options()

        def __init__(
            self, store: str, rank: int, size: int, options: Options | None = None, timeout: float = 0
        ) -> None:
            if options is None:
                options = Options()
                options._devices, options._timeout = (object(),), timeout
            self.options = options

    Group._Options = Options  # type: ignore[attr-defined]
    torch = SimpleNamespace(compiler=SimpleNamespace(), distributed=SimpleNamespace(ProcessGroupGloo=Group))
    for _ in range(2):
        vllm_versions.adjust_torch(torch)
    first, second, third = (Group("store", 0, 1, timeout=timeout) for timeout in (5, 6, 7))
    assert first.options._devices == second.options._devices == third.options._devices
    assert [group.options._timeout for group in (first, second, third)] == [5, 6, 7]
    with_own_options = Options()
    assert Group("store", 0, 1, with_own_options).options is with_own_options
    vllm_versions.adjust_torch(SimpleNamespace(compiler=SimpleNamespace(), distributed=SimpleNamespace()))
