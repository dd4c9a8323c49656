"""All that differs between the versions of vLLM that a cell of several nodes runs on: 0.13 and 0.16, which stacks of
Neuron pin, and this project's own 0.32. No other module of the cell asks what its vLLM has.

It asks for what is there, never for a version's number, and imports nothing of vLLM.
"""

import inspect
from typing import Any


def new_worker(wrapper: Any, vllm_config: Any, rank: int) -> Any:
    """A `WorkerWrapperBase`: 0.13 wants the configuration when it is made, and later ones in `init_worker` alone."""
    given = {"rpc_rank": 0, "global_rank": rank, "vllm_config": vllm_config}
    wanted = inspect.signature(wrapper).parameters
    return wrapper(**{name: value for name, value in given.items() if name in wanted})


def update_block_size(platform: Any, vllm_config: Any) -> None:
    """Let the platform choose the size of a KV block, where it has a say: it has none in 0.16.

    `Platform.__getattr__` answers None for what it lacks, so only its class tells.
    """
    if hasattr(type(platform), "update_block_size_for_backend"):
        platform.update_block_size_for_backend(vllm_config)


def warms_up_by_method(executor: type[Any]) -> bool:
    """Whether vLLM's last call before it serves is the executor's own `compile_or_warm_up_model`.

    Before 0.32 (seen in 0.13, 0.16 and 0.24) `initialize_from_config` is the last, and calls the workers itself.
    """
    return hasattr(executor, "compile_or_warm_up_model")


def has_dummy_batch(worker: Any) -> bool:
    """Whether a worker can take a step of nothing, which it need not where its model is compiled before it starts."""
    return callable(getattr(worker, "execute_dummy_batch", None))
