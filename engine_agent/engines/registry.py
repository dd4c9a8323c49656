"""The engines by the name that an engine plan gives, and the checks that every plan must pass."""

from collections.abc import Mapping
from pathlib import Path

from engine_agent.engines.base import EngineAdapter, EngineUnavailable, follower_count
from engine_agent.engines.generic.adapter import GenericAdapter
from engine_agent.engines.generic.environment import installed_programs
from engine_agent.engines.llama_cpp.adapter import LlamaCppAdapter
from engine_agent.engines.llama_cpp.environment import installed_python as installed_llama_cpp
from engine_agent.engines.neuron.adapter import NeuronAdapter
from engine_agent.engines.sglang.adapter import SglangAdapter
from engine_agent.engines.sim.adapter import SimAdapter
from engine_agent.engines.tensorrt_llm.adapter import TensorrtLlmAdapter
from engine_agent.engines.triton.adapter import TritonAdapter
from engine_agent.engines.triton.environment import installed_python as installed_triton
from engine_agent.engines.vllm.adapter import VllmAdapter
from engine_agent.engines.vllm.environment import installed_python as installed_vllm
from engine_agent.protocol.engine_options import refused_in_plan
from engine_agent.protocol.messages import Assignment, EnginePlan
from engine_agent.protocol.states import CellRole

ADAPTERS: Mapping[str, EngineAdapter] = {
    adapter.name: adapter
    for adapter in (
        GenericAdapter(),
        LlamaCppAdapter(),
        NeuronAdapter(),
        SglangAdapter(),
        SimAdapter(),
        TensorrtLlmAdapter(),
        TritonAdapter(),
        VllmAdapter(),
    )
}

KV_TRANSFER_ENGINES = frozenset({SimAdapter.name, VllmAdapter.name})
"""Engines that hand prompts over to each other."""

REPLAYING_ENGINES = frozenset({SimAdapter.name, VllmAdapter.name})
"""Engines that mark tokens in streams, and continue the streams of other cells."""


def engine_adapter(engine: str) -> EngineAdapter:
    """Returns the adapter of an engine. Raises EngineUnavailable if no engine has this name."""
    adapter = ADAPTERS.get(engine)
    if adapter is None:
        raise EngineUnavailable(f"unknown engine {engine!r}; this agent knows {', '.join(sorted(ADAPTERS))}")
    return adapter


def check_plan(plan: EnginePlan) -> None:
    """Rejects options and variables that an engine may not get. Raises EngineUnavailable if an option or variable of
    the plan is not listed and was not allowed separately."""
    places = {artifact.uri.removeprefix("file://") for artifact in plan.artifacts}
    refused = refused_in_plan(plan.engine, plan.args, plan.env, plan.widened, places)
    if refused is not None:
        raise EngineUnavailable(refused.message)


def check_role(assignment: Assignment) -> None:
    """Rejects a role that this cell cannot have. Raises EngineUnavailable if its engine cannot hand prompts over, or
    not in a cell of several nodes."""
    role, engine = assignment.cell_role, assignment.plan.engine
    if role is CellRole.MIXED:
        return
    if engine not in KV_TRANSFER_ENGINES:
        can = " and ".join(sorted(KV_TRANSFER_ENGINES))
        raise EngineUnavailable(f"engine {engine} cannot be a {role} cell: {can} can; make the cell mixed")
    if follower_count(assignment) > 0:
        raise EngineUnavailable(
            f"a {role} cell has one node, and this one has {follower_count(assignment) + 1}: cells of several nodes"
            " cannot hand prompts over; make the cell mixed"
        )
    if not assignment.kv_layout:
        raise EngineUnavailable(f"the order of a {role} cell names no KV layout, which its peers are found by")


def installed_python(engine: str, cache: Path) -> Path | None:
    """Returns the interpreter of an environment that the operator put into the cache, or linked there."""
    python = cache / "engines" / engine / "bin" / "python"
    return python if python.exists() else None


def engine_pythons(cache: Path) -> dict[str, Path]:
    """Returns the interpreters of installed engine environments by engine, and programs of engine generic by
    `generic/NAME`."""
    pythons = {
        LlamaCppAdapter.name: installed_llama_cpp(cache),
        NeuronAdapter.name: installed_python(NeuronAdapter.name, cache),
        SglangAdapter.name: installed_python(SglangAdapter.name, cache),
        TensorrtLlmAdapter.name: installed_python(TensorrtLlmAdapter.name, cache),
        TritonAdapter.name: installed_triton(cache),
        VllmAdapter.name: installed_vllm(cache),
    }
    return {**installed_programs(cache), **{engine: path for engine, path in pythons.items() if path is not None}}
