"""Whether a draft may be called validated: where a cell can be made of it, and what proves that it answers right. Pure.

Its artifacts are read elsewhere; here is what can be known without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from engine_agent.protocol.messages import Artifact
from models_registry.planning.engine_arguments import WITH_WEIGHTS, render_version
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.speculation import Draft, read_speculation
from models_registry.planning.versions import InvalidVersion, VersionSpec

PLAN_BYTES_MAX = 192 * 1024
"""Encoded. An agent is sent it in one frame of at most 256 KiB, together with its cell's other facts."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`problems` says of each instance type why no cell can be made of it there, empty where one can. `objection` is
    why the version cannot be validated, empty if it can as far as this module knows."""

    problems: Mapping[str, str]
    objection: str


def judge_version(spec: VersionSpec, machines: Mapping[str, InstanceShape]) -> Judgement:
    """Judge a version on the instance types that there are."""
    problems = {name: _problem(spec, name, machines) for name in sorted(spec.parallelism)}
    return Judgement(problems, _objection(spec, problems))


def artifacts_of(spec: VersionSpec) -> tuple[Artifact, ...]:
    """The weights that a version names: its own, then those of its draft model. A digest may be empty: not known yet.

    Raises:
        InvalidVersion: its speculation is nonsense.
    """
    speculation = read_speculation(spec.reference, spec.engine, spec.speculation)
    own = (Artifact(spec.artifact_uri, spec.artifact_digest),) if spec.artifact_uri else ()
    return (*own, speculation.artifact) if isinstance(speculation, Draft) else own


def _problem(spec: VersionSpec, name: str, machines: Mapping[str, InstanceShape]) -> str:
    if name not in machines:
        return f"there is no instance type {name!r}; there are {', '.join(sorted(machines))}"
    try:
        plan = render_version(spec, machines[name]).plan
    except InvalidVersion as error:
        return str(error)
    size = len(msgspec.json.encode(plan))
    if size > PLAN_BYTES_MAX:
        return f"its engine plan has {size} bytes; agents take {PLAN_BYTES_MAX}: shorten options or golden prompts"
    return ""


def _objection(spec: VersionSpec, problems: Mapping[str, str]) -> str:
    if not problems:
        return "parallelism names no instance type, so there is nothing that a cell could be made of"
    if all(problems.values()):
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    if spec.engine in WITH_WEIGHTS and not spec.artifact_uri:
        return f"engine {spec.engine} needs artifact_uri, the place of the weights"
    if not spec.golden_prompts and not spec.golden_waiver.strip():
        return "it has no golden prompts; add some, or say in golden_waiver why it has none"
    return ""
