"""Renders a model version into the plan that agents run. Pure: the same version gives the same plan everywhere.

What only a node knows (ports, rank, paths) is added by the agent's engine adapter.
"""

from collections.abc import Mapping
from typing import Any

from engine_agent.protocol.messages import Artifact, EnginePlan
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.parallelism import Degrees, degrees_on, stated_degrees
from models_registry.planning.versions import InvalidVersion, VersionSpec

ENGINES = ("sim", "vllm")


def nodes_per_cell(spec: VersionSpec, instance_type: str) -> int:
    """How many nodes of this instance type one cell takes.

    Raises:
        InvalidVersion: the version says nothing about this instance type, or says nonsense.
    """
    return stated_degrees(spec.reference, spec.parallelism, instance_type).get("nodes", 1)


def render_engine_plan(spec: VersionSpec, machine: InstanceShape) -> EnginePlan:
    """The engine plan of a version for cells of these machines, the same on every rank.

    Raises:
        InvalidVersion: unknown engine, or an option of a type that no command line can carry.
    """
    if spec.engine not in ENGINES:
        raise InvalidVersion(f"{spec.reference}: engine is {spec.engine!r}; it must be one of {', '.join(ENGINES)}")
    if spec.engine == "vllm" and not spec.artifact_uri:
        raise InvalidVersion(f"{spec.reference}: engine vllm needs artifact_uri, the place of the weights")
    return EnginePlan(
        engine=spec.engine,
        served_model=spec.model,
        max_concurrency=spec.max_concurrency,
        ready_timeout_s=spec.ready_timeout_s,
        artifact=Artifact(uri=spec.artifact_uri, digest=spec.artifact_digest) if spec.artifact_uri else None,
        args=_arguments(spec, degrees_on(spec.reference, spec.parallelism, machine)),
        env={name: str(value) for name, value in spec.engine_env.items()},
        probe_prompt=spec.golden_prompts[0][0] if spec.golden_prompts else "ping",
    )


def _arguments(spec: VersionSpec, degrees: Degrees) -> tuple[str, ...]:
    own: dict[str, Any] = {"max_num_seqs": spec.max_concurrency}
    if spec.engine == "vllm":
        own["max_model_len"] = spec.context_length
        if degrees.tp > 1:
            own["tensor_parallel_size"] = degrees.tp
        if degrees.pp > 1:
            own["pipeline_parallel_size"] = degrees.pp
    return tuple(_flags({**own, **spec.engine_options}, spec.reference))


def _flags(options: Mapping[str, Any], reference: str) -> list[str]:
    """`{"max_num_seqs": 16, "enforce_eager": True}` -> `["--enforce-eager", "--max-num-seqs", "16"]`, sorted."""
    flags: list[str] = []
    for name, value in sorted(options.items()):
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False or value is None:
            continue
        elif isinstance(value, str | int | float):
            flags += [flag, str(value)]
        else:
            raise InvalidVersion(
                f"{reference}: engine_options.{name} is {type(value).__name__}; it must be text, a number or true/false"
            )
    return flags
