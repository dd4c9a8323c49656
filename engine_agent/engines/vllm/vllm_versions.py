"""Differences between the versions of vLLM that cells of several nodes run on: 0.13 and 0.16, which Neuron stacks pin,
and this project's 0.32. It checks for attributes, never for version numbers, and imports vLLM only in functions."""

import inspect
import os
from typing import Any


def new_worker(wrapper: Any, vllm_config: Any, rank: int) -> Any:
    """Returns a `WorkerWrapperBase`: 0.13 takes the configuration in its constructor, later ones in `init_worker`."""
    given = {"rpc_rank": 0, "global_rank": rank, "vllm_config": vllm_config}
    wanted = inspect.signature(wrapper).parameters
    return wrapper(**{name: value for name, value in given.items() if name in wanted})


def update_block_size(platform: Any, vllm_config: Any) -> None:
    """Lets the platform choose the size of a KV block, except in 0.16, where it cannot. `Platform.__getattr__` returns
    None for missing attributes, so the class is checked."""
    if hasattr(type(platform), "update_block_size_for_backend"):
        platform.update_block_size_for_backend(vllm_config)


def warms_up_by_method(executor: type[Any]) -> bool:
    """Whether vLLM's last call before it serves is the executor's `compile_or_warm_up_model`. Before 0.32 (seen in
    0.13, 0.16 and 0.24) `initialize_from_config` is the last, and calls the workers itself."""
    return hasattr(executor, "compile_or_warm_up_model")


def has_dummy_batch(worker: Any) -> bool:
    """Whether a worker can take an empty step; it need not if its model is compiled before it starts."""
    return callable(getattr(worker, "execute_dummy_batch", None))


def adjust_torch(torch: Any) -> None:
    """Call it before a worker is built; a second call does nothing."""
    load_plain_compiled_code(torch.compiler)
    share_gloo_device(getattr(torch.distributed, "ProcessGroupGloo", None))


def share_gloo_device(group_class: Any) -> None:
    """Lets all gloo groups of a process use the device of the first. Each device has a thread that wakes 100 times a
    second, and vLLM makes 15 groups per worker: 11 ms of a core a second with torch 2.13, 1.5 with one device."""
    create: Any = getattr(group_class, "__init__", None)
    if not hasattr(group_class, "options") or getattr(create, "is_patched", False):
        return
    devices: dict[int, Any] = {}  # by process: a device's thread does not exist in a fork

    def create_group(self: Any, *args: Any, **kwargs: Any) -> None:
        if os.getpid() in devices and len(args) == 3 and set(kwargs) == {"timeout"}:
            options = group_class._Options()
            options._devices, options._timeout = devices[os.getpid()], kwargs["timeout"]
            create(self, *args, options)
        else:
            create(self, *args, **kwargs)
            devices.setdefault(os.getpid(), self.options._devices)

    create_group.__dict__["is_patched"] = True
    group_class.__init__ = create_group


def load_plain_compiled_code(compiler: Any) -> None:
    """Lets vLLM load code that it compiled ahead of time with torch's own backend, as on CPU. vLLM 0.32 calls
    `finalize_loading`, which only functions of vLLM's backend have, fails, and compiles again at every start.

    `compiler` is `torch.compiler`. Does nothing where torch has no such code, or at a second call."""
    load = getattr(compiler, "load_compiled_function", None)
    if load is None or getattr(load, "is_patched", False):
        return

    def load_compiled_function(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        function = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if function is not None and not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda _: None
        return loaded

    load_compiled_function.__dict__["is_patched"] = True
    compiler.load_compiled_function = load_compiled_function


SCHEDULER_HAS = (
    *("current_step", "kv_holding_waiting", "max_num_active_reqs", "max_num_scheduled_tokens", "running", "waiting"),
    *("requires_kv_delivery", "_is_blocked_waiting_status", "_preempt_request", "_request_blocks_can_be_freed"),
)
"""Attributes of vLLM's scheduler that the order of classes uses; seen in 0.32, not all of them in 0.24 or before."""
REQUEST_HAS = (
    *("arrival_time", "is_prefill_chunk", "next_decode_eligible_step", "num_computed_tokens"),
    *("num_output_placeholders", "num_tokens_with_spec", "priority", "request_id", "status"),
)


def why_no_class_order(config: Any, kv_cache: Any, scheduler: type[Any], request: type[Any]) -> str:
    """Returns why this scheduler cannot limit batch prompts; empty if it can. If prompts are read whole, or in pieces
    of a size that the model sets, a smaller limit would block them forever. Attributes are set in an `__init__`, so its
    code names them."""
    missing = [name for name in SCHEDULER_HAS if name not in _names_of(scheduler)]
    missing += [f"Request.{name}" for name in REQUEST_HAS if name not in _names_of(request)]
    if missing:
        return f"the scheduler of this vLLM has no {', '.join(missing)}"
    if config.scheduler_config.policy != "priority":
        return "it does not schedule by priority"
    if not config.scheduler_config.enable_chunked_prefill:
        return "chunked prefill is off"
    if kv_cache.has_mamba_layers and config.cache_config.mamba_cache_mode == "align":
        return "the model's prompts are read in whole blocks"
    if config.scheduler_config.disable_chunked_mm_input and config.model_config.supports_multimodal_inputs:
        return "parts of a prompt may not be cut"
    return ""


CLIENT_ADDS = ("self", "request", "prompt", "parent_req", "index", "queue")
"""Parameters of `AsyncLLM._add_request`."""
PROCESSOR_HAS = ("abort_requests", "add_request", "has_request", "process_outputs", "request_states", "tracing_enabled")
OUTPUT_HAS = ("request_id", "new_token_ids", "finish_reason", "stop_reason")


def why_no_continuation(client: Any, processor: type[Any], queue: type[Any], output: type[Any]) -> str:
    """Returns why the server of this vLLM cannot process tokens of another engine; empty if it can. Arguments are
    `AsyncLLM`, `OutputProcessor`, `RequestOutputCollector` and `EngineCoreOutput`. It sees missing names only: a test
    compares the code of all functions that a continuation depends on with the code that was read."""
    missing = [
        f"AsyncLLM.{name}" for name in ("generate", "_add_request", "check_admission") if not hasattr(client, name)
    ]
    if not missing and tuple(inspect.signature(client._add_request).parameters) != CLIENT_ADDS:
        missing.append(f"AsyncLLM._add_request({', '.join(CLIENT_ADDS[1:])})")
    missing += [f"OutputProcessor.{name}" for name in PROCESSOR_HAS if name not in _names_of(processor)]
    missing += [f"RequestOutputCollector.{name}" for name in ("get_nowait",) if not hasattr(queue, name)]
    missing += [f"EngineCoreOutput.{name}" for name in OUTPUT_HAS if name not in output.__annotations__]
    return f"this vLLM has no {', '.join(missing)}" if missing else ""


def _names_of(kind: type[Any]) -> set[str]:
    return {*dir(kind), *kind.__init__.__code__.co_names}


def cpu_communicator() -> Any:
    """Returns the communicator of the tensor-parallel group of CPU workers, or None. `dist_module` is what it calls in
    all versions that have CPU workers of several ranks: `torch.distributed` (gloo), or a class of vLLM's if ranks share
    memory."""
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized():
        return None
    communicator = get_tp_group().device_communicator
    return communicator if getattr(communicator, "dist_module", None) is not None else None
