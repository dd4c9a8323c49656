"""A platform of vLLM's as Neuron's plugin is one: it names its worker, and each of those is alone in its world.

vLLM imports this while it is itself half imported, so it imports nothing else.
"""

from typing import Any

from vllm.platforms.interface import Platform, PlatformEnum

PACKAGE = "tests.engine_agent.engines.vllm.cell"


def register() -> str:
    """The platform's class, by name: an entry point of `vllm.platform_plugins`."""
    return f"{PACKAGE}.neuron_like_platform.NeuronLikePlatform"


class NeuronLikePlatform(Platform):  # type: ignore[misc]  # the engine's libraries have no types here
    """Gives every sequence one block, as the plugin does without prefix caching."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.model_config is None:
            return
        vllm_config.parallel_config.worker_cls = f"{PACKAGE}.neuron_like.NeuronLikeWorker"
        vllm_config.cache_config.block_size = vllm_config.model_config.max_model_len

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None: ...

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False
