"""Proposes how to serve a model on each instance type: degrees, quantization, what fits and what it costs, and why a
type does not fit. Ranked by price per token that fits at the same time. Pure. A proposal passes the checks of
validation (`lifecycle.fitted_rendering`), so that a version with its degrees can be validated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from models_registry.instance_types.planner import LOCAL_CPU, InstanceShape
from models_registry.versions.planning.checkpoint import Checkpoint
from models_registry.versions.planning.lifecycle import fitted_rendering
from models_registry.versions.planning.machines import NEURON_RANKS_PER_NODE, Degrees, is_neuron
from models_registry.versions.planning.memory import MemoryEstimate, estimate_memory
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

NODES_TRIED = (1, 2, 4, 8)
WITH_FP8 = ("b200", "b300", "gb200", "h100", "h200", "l4", "l40s", "rtx-pro-4500", "rtx-pro-6000")
"""Accelerators with FP8 matrix units, for which vLLM quantizes linear layers while it loads."""
NO_ENGINE = ("none",)
PROPOSED_ENGINES = ("neuron", "vllm")
"""Engines of proposals. The choice of any other one is kept."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One way to serve the model. `price_per_hour` of a cell and `price` per million tokens that fit at the same time
    and hour, in US dollars; 0: unknown. With a `problem` it cannot be served there, and the rest explains why."""

    instance_type: str
    engine: str
    degrees: Degrees
    quantization: str = ""
    price_per_hour: float = 0.0
    price: float = 0.0
    memory: MemoryEstimate | None = None
    problem: str = ""


def propose(spec: VersionSpec, checkpoint: Checkpoint, machines: Mapping[str, InstanceShape]) -> tuple[Proposal, ...]:
    """The cheapest proposal for each instance type, cheapest type first; then types of unknown price, then those that
    do not fit. `spec`: a version whose context length, concurrency and options are kept."""
    found = [_best(spec, checkpoint, machine) for name, machine in sorted(machines.items()) if _can_serve(machine)]
    return tuple(sorted(found, key=_rank))


def _can_serve(machine: InstanceShape) -> bool:
    return machine.accelerator not in NO_ENGINE and machine.cores > 0


def _rank(proposal: Proposal) -> tuple[bool, bool, float, str]:
    return bool(proposal.problem), not proposal.price, proposal.price, proposal.instance_type


def _best(spec: VersionSpec, checkpoint: Checkpoint, machine: InstanceShape) -> Proposal:
    """More nodes are tried only if fewer do not fit. If none fits, the largest split of one node, with its reason and
    that of the largest split over several."""
    failed: list[Proposal] = []
    for nodes in NODES_TRIED:
        tried = list(_tried(spec, checkpoint, machine, nodes))
        if fitting := [proposal for proposal in tried if not proposal.problem]:
            return min(fitting, key=lambda each: (_rank(each), each.quantization != "", -each.degrees.tp))
        failed += [max(tried, key=lambda each: each.degrees.world_size)] if tried else []
    if not failed:
        problem = f"no degrees of {machine.name} divide {checkpoint.shape.heads} attention heads"
        return Proposal(machine.name, _engine(machine), Degrees(), problem=problem)
    first, last = failed[0], failed[-1]
    more = f"; with {last.degrees.nodes} nodes: {last.problem}" if last is not first else ""
    return replace(first, problem=first.problem + more)


def _engine(machine: InstanceShape) -> str:
    return "neuron" if is_neuron(machine) else "vllm"


def _tried(spec: VersionSpec, checkpoint: Checkpoint, machine: InstanceShape, nodes: int) -> Iterator[Proposal]:
    engine = _engine(machine)
    for tp in _tensor_degrees(machine, nodes, checkpoint.shape.heads):
        for quantization in _quantizations(checkpoint, machine, engine):
            yield _proposal(spec, checkpoint, machine, engine, Degrees(nodes=nodes, tp=tp), quantization)


def _tensor_degrees(machine: InstanceShape, nodes: int, heads: int) -> list[int]:
    per_node = NEURON_RANKS_PER_NODE.get(machine.accelerator, range(1, machine.cores + 1))
    return [count * nodes for count in per_node if count <= machine.cores and count * nodes <= heads]


def _quantizations(checkpoint: Checkpoint, machine: InstanceShape, engine: str) -> tuple[str, ...]:
    is_plain = not checkpoint.shape.quantization
    return ("", "fp8") if engine == "vllm" and is_plain and machine.accelerator in WITH_FP8 else ("",)


def _proposal(
    spec: VersionSpec,
    checkpoint: Checkpoint,
    machine: InstanceShape,
    engine: str,
    degrees: Degrees,
    quantization: str,
) -> Proposal:
    stated: dict[str, Any] = {"method": quantization} if quantization else {}
    options = spec.engine_options if spec.engine == engine else {}
    tried = replace(
        spec,
        engine=engine,
        parallelism={machine.name: {"nodes": degrees.nodes, "tp": degrees.tp}},
        quantization=stated,
        engine_options=options,
        by_type={},
        roles={},
        speculation={},
        adapters=(),
        artifact_uri=spec.artifact_uri or "file:///checkpoint",
    )
    hourly = machine.price_per_hour * degrees.nodes
    plain = Proposal(machine.name, engine, degrees, quantization, hourly)
    try:
        fitted_rendering(tried, machine, {tried.artifact_uri: checkpoint})
    except InvalidVersion as error:
        problem = str(error).removeprefix(f"{tried.reference}: ")
        return replace(plain, problem=problem, memory=estimate_memory(tried, checkpoint, degrees, machine))
    memory = estimate_memory(tried, checkpoint, degrees, machine)
    price = hourly / memory.tokens * 1e6 if memory.tokens else 0.0
    problem = "" if machine.name == LOCAL_CPU else memory.shortfall  # it stands for hosts of any size
    return replace(plain, price=price, memory=memory, problem=problem)
