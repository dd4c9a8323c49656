"""Which engines there are, by the name that an engine plan gives. It looks them up and never starts one."""

from collections.abc import Mapping

from engine_agent.engines.base import EngineAdapter, EngineUnavailable
from engine_agent.engines.sim.adapter import SimAdapter
from engine_agent.engines.vllm.adapter import VllmAdapter

ADAPTERS: Mapping[str, EngineAdapter] = {adapter.name: adapter for adapter in (SimAdapter(), VllmAdapter())}


def engine_adapter(engine: str) -> EngineAdapter:
    """The adapter of an engine.

    Raises:
        EngineUnavailable: no engine has this name.
    """
    adapter = ADAPTERS.get(engine)
    if adapter is None:
        raise EngineUnavailable(f"unknown engine {engine!r}; this agent knows {', '.join(sorted(ADAPTERS))}")
    return adapter
