"""The states of versions and validations with their allowed changes; the rules for each field of a draft
(`check_draft`); and the decision whether a draft can be validated, which needs a possible cell and evidence of correct
answers (`evaluate_version`). Only a draft may be edited; later only its state changes, and only forward. Pure:
artifacts are read elsewhere."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from engine_agent.protocol.manifest import BadArtifact
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.states import CellRole
from kernel.tones import Tone
from models_registry.artifacts.planner import DIGEST, parse_place
from models_registry.instance_types.planner import InstanceShape, unknown_type_text
from models_registry.versions.planning.checkpoint import Checkpoint
from models_registry.versions.planning.engine_arguments import (
    ENGINES,
    Rendering,
    adapters_of,
    check_engine_options,
    refused_engine_option,
    render_version,
)
from models_registry.versions.planning.machines import stated_degrees
from models_registry.versions.planning.memory import ENGINES_WITH_ARITHMETIC, check_fits, with_heads
from models_registry.versions.planning.roles import check_apart, read_roles, role_spec, with_role
from models_registry.versions.planning.spec import OF_AN_ENGINE, InvalidVersion, VersionSpec, one_of, read_quantization
from models_registry.versions.planning.speculation import Draft, read_speculation


class VersionState(StrEnum):
    DRAFT = "draft"
    VALIDATED = "validated"
    RELEASED = "released"
    RETIRED = "retired"


VERSION_ALLOWED: dict[VersionState, frozenset[VersionState]] = {
    VersionState.DRAFT: frozenset({VersionState.VALIDATED}),
    VersionState.VALIDATED: frozenset({VersionState.RELEASED, VersionState.RETIRED}),
    VersionState.RELEASED: frozenset({VersionState.RETIRED}),
    VersionState.RETIRED: frozenset(),
}

VERSION_TONE: dict[VersionState, Tone] = {
    VersionState.DRAFT: Tone.IDLE,
    VersionState.VALIDATED: Tone.BAKE,
    VersionState.RELEASED: Tone.OK,
    VersionState.RETIRED: Tone.IDLE,
}


class ValidationState(StrEnum):
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"


VALIDATION_TONE: dict[ValidationState, Tone] = {
    ValidationState.RUNNING: Tone.MOVING,
    ValidationState.PASSED: Tone.OK,
    ValidationState.FAILED: Tone.BAD,
}


def states_before(to: VersionState) -> frozenset[VersionState]:
    """The states from which a version may enter this one."""
    return frozenset(state for state, allowed in VERSION_ALLOWED.items() if to in allowed)


def may_be_rolled_out(state: VersionState, *, allow_unreleased: bool) -> bool:
    """Released versions, and validated ones if `allow_unreleased`. Never drafts, because they still change."""
    return state is VersionState.RELEASED or (allow_unreleased and state is VersionState.VALIDATED)


def choices(states: type[StrEnum]) -> list[tuple[str, str]]:
    """Django's `choices` of an enum: value and label."""
    return [(state.value, state.value.capitalize()) for state in states]


GOLDEN_PROMPTS_MAX = 16
"""Each is sent sequentially before a cell takes traffic."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class BrokenRule(ValueError):
    """A field of a draft breaks a rule: dotted path of the field, short name of the rule, and the expected value."""

    field: str
    rule: str
    message: str

    def __str__(self) -> str:
        return self.message


def check_draft(spec: VersionSpec) -> None:
    """Checks each field, then the combination on every instance type that differs. Raises BrokenRule for the first
    field that breaks a rule."""
    _check_storable(spec)
    _check_golden(spec)
    for kind in spec.parallelism:
        _read("parallelism", stated_degrees, spec.reference, spec.parallelism, kind)
    _check_fields(spec)
    for kind in spec.by_type:
        _check_type(spec, kind)


def _check_fields(spec: VersionSpec) -> None:
    """The fields that may differ by instance type."""
    if spec.engine not in ENGINES:
        raise BrokenRule("engine", "choice", f"engine is {spec.engine!r}; {one_of(ENGINES, spec.engine)}")
    _check_artifact(spec)
    _check_engine(spec)
    _read("speculation", read_speculation, spec.reference, spec.engine, spec.speculation)
    _read("quantization", read_quantization, spec.reference, spec.engine, spec.quantization)
    _read("adapters", adapters_of, spec)
    _check_roles(spec)


def _check_type(spec: VersionSpec, kind: str) -> None:
    """Names a field that breaks a rule on this instance type, if the version states it there."""
    _read("by_type", spec.on, kind)
    on_type = spec.on(kind)
    try:
        _check_fields(on_type)
    except BrokenRule as broken:
        place = f"by_type.{kind}"
        if broken.field.partition(".")[0] in spec.by_type[kind]:
            place += f".{broken.field}"
        message = broken.message.removeprefix(f"{on_type.reference}: ")
        raise BrokenRule(place, broken.rule, f"on {kind}, {message}") from None


def _read(field: str, read: Any, *arguments: Any) -> None:
    try:
        read(*arguments)
    except InvalidVersion as error:
        raise BrokenRule(field, "readable", str(error)) from None


def _check_roles(spec: VersionSpec) -> None:
    _read("roles", read_roles, spec)
    for role, options in read_roles(spec).items():
        if refused := refused_engine_option(with_role(spec, options)):
            field, why = refused
            raise BrokenRule(f"roles.{role}.{field}", why.rule, why.message)


def _check_artifact(spec: VersionSpec) -> None:
    if spec.artifact_uri:
        try:
            parse_place(spec.artifact_uri)
        except BadArtifact as error:
            raise BrokenRule("artifact_uri", "place", str(error)) from None
    if spec.artifact_digest and not DIGEST.fullmatch(spec.artifact_digest):
        raise BrokenRule(
            "artifact_digest",
            "digest",
            f"artifact_digest is {spec.artifact_digest!r}; it must be sha256: and 64 hexadecimal digits, or empty: "
            "validation then computes it",
        )
    if spec.artifact_digest and not spec.artifact_uri:
        raise BrokenRule("artifact_digest", "place", "artifact_digest is set without artifact_uri")


def _check_engine(spec: VersionSpec) -> None:
    for name, value in spec.engine_options.items():
        if not isinstance(value, str | int | float | dict) and value is not None:
            message = f"engine_options.{name} is {value!r}; it must be text, a number or true/false"
            raise BrokenRule(f"engine_options.{name}", "type", message)
    for name in spec.engine_env:
        if not _VARIABLE.fullmatch(name):
            message = (
                f"engine_env names {name!r}; a variable has letters, digits and _, and does not start with a digit"
            )
            raise BrokenRule("engine_env", "name", message)
    if refused := refused_engine_option(spec):
        field, why = refused
        raise BrokenRule(field, why.rule, why.message)


def _check_golden(spec: VersionSpec) -> None:
    if len(spec.golden_prompts) > GOLDEN_PROMPTS_MAX:
        many = len(spec.golden_prompts)
        raise BrokenRule("golden_prompts", "count", f"{many} golden prompts; the limit is {GOLDEN_PROMPTS_MAX}")
    if spec.golden_prompts and spec.golden_waiver:
        message = "golden_waiver is set although there are golden prompts; empty one of the two"
        raise BrokenRule("golden_waiver", "either", message)


def _check_storable(spec: VersionSpec) -> None:
    for field in ("parallelism", "by_type", "adapters", *OF_AN_ENGINE):
        if _has_nul(getattr(spec, field)):
            raise BrokenRule(field, "nul", f"{field} has a NUL character, which the database rejects")


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return any(_has_nul(part) for part in value)
    return False


PLAN_BYTES_MAX = 192 * 1024
"""Encoded. An agent receives it in one frame of at most 256 KiB, with other facts of its cell."""


Checkpoints = Mapping[str, Checkpoint]
NO_CHECKPOINTS: Checkpoints = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VersionEvaluation:
    """`problems`: why no cell is possible, by instance type; empty if one is. `objection`: why the version cannot be
    validated; empty if this module found nothing."""

    problems: Mapping[str, str]
    objection: str


def evaluate_version(
    spec: VersionSpec, machines: Mapping[str, InstanceShape], checkpoints: Checkpoints = NO_CHECKPOINTS
) -> VersionEvaluation:
    """`checkpoints`: facts of the artifacts that were read, by URI; without them, neither heads and layers that the
    version does not state nor memory are checked."""
    problems = {name: _problem(spec, name, machines, checkpoints) for name in sorted(spec.parallelism)}
    return VersionEvaluation(problems, _validation_objection(spec, problems))


def artifacts_of(spec: VersionSpec) -> tuple[Artifact, ...]:
    """The weights of a version on any instance type: its own, its draft model's, then its adapters', each once. A
    digest may be empty: unknown. Raises InvalidVersion if its speculation or an adapter is invalid."""
    everywhere = (spec, *(spec.on(kind) for kind in spec.by_type))
    return tuple(dict.fromkeys(artifact for each in everywhere for artifact in _artifacts_of(each)))


def _artifacts_of(spec: VersionSpec) -> tuple[Artifact, ...]:
    speculation = read_speculation(spec.reference, spec.engine, spec.speculation)
    own = (Artifact(spec.artifact_uri, spec.artifact_digest),) if spec.artifact_uri else ()
    drafts = (speculation.artifact,) if isinstance(speculation, Draft) else ()
    of_adapters = (adapter.artifact for adapter in adapters_of(spec) if adapter.artifact is not None)
    return (*own, *drafts, *of_adapters)


def fitted_rendering(spec: VersionSpec, machine: InstanceShape, checkpoints: Checkpoints) -> Rendering:
    """A version rendered for these machines, checked against its checkpoint. Raises InvalidVersion as `render_version`
    and `check_fits` do."""
    spec = spec.on(machine.name)
    checkpoint = checkpoints.get(spec.artifact_uri)
    if checkpoint is None or spec.engine not in ENGINES_WITH_ARITHMETIC:
        return render_version(spec, machine)
    rendering = render_version(with_heads(spec, checkpoint), machine)
    check_fits(spec, checkpoint, rendering.degrees, machine)
    return rendering


def _problem(spec: VersionSpec, name: str, machines: Mapping[str, InstanceShape], checkpoints: Checkpoints) -> str:
    if name not in machines:
        return unknown_type_text(name, machines)
    try:
        check_engine_options(spec, name)
        plan = fitted_rendering(spec, machines[name], checkpoints).plan
        if spec.roles:
            check_apart(spec, machines[name])
            for role in (CellRole.PREFILL, CellRole.DECODE):
                fitted_rendering(role_spec(spec, role, name), machines[name], checkpoints)
    except InvalidVersion as error:
        return str(error)
    size = len(msgspec.json.encode(plan))
    if size > PLAN_BYTES_MAX:
        return (
            f"its engine plan has {size} bytes; the limit of agents is {PLAN_BYTES_MAX}: shorten options or "
            "golden prompts"
        )
    return ""


def _validation_objection(spec: VersionSpec, problems: Mapping[str, str]) -> str:
    if not problems:
        return "parallelism names no instance type, so no cell is possible"
    if all(problems.values()):
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    if not spec.golden_prompts and not spec.golden_waiver.strip():
        return "it has no golden prompts; add some, or state the reason in golden_waiver"
    return ""
