"""Renders a version for each role, and fingerprints the KV layout that prefill cells hand over to decode cells. Pure.

A version is the same weights in every role; its field `roles` states what prefill and decode cells have otherwise: how
tensors are split, options of the engine, how many concurrent requests. What must be equal for a handover cannot be
stated
there. `engine_agent` does the handover; the fleet decides how many cells have which role.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from engine_agent.protocol.states import CellRole
from models_registry.benchmarks.planning.workload import digest_of
from models_registry.versions.planning.engine_arguments import Rendering, render_version
from models_registry.versions.planning.machines import Degrees, InstanceShape, degrees_on
from models_registry.versions.planning.spec import FieldReader, InvalidVersion, VersionSpec, one_of

APART = (CellRole.PREFILL.value, CellRole.DECODE.value)
CONNECTORS: Mapping[str, str] = MappingProxyType({"sim": "sim-1", "vllm": "NixlConnector-1"})
"""By engine: what carries a prompt from cell to cell, and the version of how it is used. Engines that are not named
hand over nothing."""
OF_LAYOUT = ("block_size", "dtype", "kv_cache_dtype", "max_model_len", "quantization")
"""Engine options that determine layout or content of the KV cache: the same in every role."""
GUESSES_FROM_TEXT = "ngram"
"""The way to speculate that needs no second KV cache."""


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """Differences of a role's cells from the version. `tp`: instance type -> tensor-parallel degree;
    `max_concurrency` None: the version's."""

    tp: Mapping[str, int]
    engine_options: Mapping[str, Any]
    max_concurrency: int | None = None


def role_spec(spec: VersionSpec, role: CellRole, instance_type: str) -> VersionSpec:
    """The version as cells of this role run it on this instance type.

    Raises:
        InvalidVersion: it is not served there, or what it says of the role is nonsense.
    """
    spec = spec.on(instance_type)
    options = read_roles(spec).get(role)
    return spec if options is None else with_role(spec, options)


def with_role(spec: VersionSpec, options: RoleOptions) -> VersionSpec:
    """The version with what a role has otherwise."""
    split = {
        kind: {**degrees, "tp": options.tp[kind]} for kind, degrees in spec.parallelism.items() if kind in options.tp
    }
    return replace(
        spec,
        parallelism={**spec.parallelism, **split},
        engine_options={**spec.engine_options, **options.engine_options},
        max_concurrency=options.max_concurrency or spec.max_concurrency,
    )


def read_roles(spec: VersionSpec) -> Mapping[CellRole, RoleOptions]:
    """What the version states of roles.

    Raises:
        InvalidVersion: an unknown role or field, or one that breaks a rule; the text names it.
    """
    fields = FieldReader(where := f"{spec.reference}: roles", spec.roles)
    stated = {CellRole(name): fields.given(name) for name in APART}
    fields.finish()
    return {role: _options(spec, f"{where}.{role}", one) for role, one in stated.items() if one is not None}


def _options(spec: VersionSpec, where: str, stated: Any) -> RoleOptions:
    fields = FieldReader(where, stated)
    parallelism = FieldReader(f"{where}.parallelism", fields.given("parallelism") or {})
    split: dict[str, int] = {}
    for kind, degrees in (fields.given("parallelism") or {}).items():
        if kind not in spec.parallelism:
            raise parallelism.wrong(kind, f"the version has no parallelism for it; {one_of(spec.parallelism, kind)}")
        of_kind = FieldReader(f"{where}.parallelism.{kind}", degrees)
        split[kind] = of_kind.whole("tp")
        of_kind.finish()
    options = fields.given("engine_options") or {}
    given = FieldReader(f"{where}.engine_options", options)
    for name in options:
        if name.replace("-", "_") in OF_LAYOUT:
            raise given.wrong(
                name, "cells that hand over must have it alike; state it in engine_options of the version"
            )
    at_once = fields.whole("max_concurrency") if fields.given("max_concurrency") is not None else None
    fields.finish()
    return RoleOptions(split, options, at_once)


def role_concurrency(stored: Mapping[str, Any]) -> dict[str, int]:
    """Role -> concurrent requests of its cells, where they differ from the version's."""
    return {role: options["max_concurrency"] for role, options in stored.items() if options.get("max_concurrency")}


def apart_objection(spec: VersionSpec, machine: InstanceShape) -> str:
    """Why cells of this version cannot be told apart on these machines; empty: they can."""
    try:
        check_apart(spec, machine)
    except InvalidVersion as wrong:
        return str(wrong)
    return ""


def check_apart(spec: VersionSpec, machine: InstanceShape) -> None:
    """Check that cells of the version can hand prompts over on these machines.

    Raises:
        InvalidVersion: they cannot; the text says why, and what would do.
    """
    spec = spec.on(machine.name)
    place = f"{spec.reference} cannot have prefill and decode cells"
    if spec.engine not in CONNECTORS:
        raise InvalidVersion(f"{place}: engine {spec.engine} hands over nothing, {' and '.join(CONNECTORS)} do")
    if spec.adapters:
        raise InvalidVersion(f"{place}: it has adapters, whose prompts cannot be handed over yet; keep its cells mixed")
    method = spec.speculation.get("method")
    if method not in (None, GUESSES_FROM_TEXT):
        raise InvalidVersion(
            f"{place}: speculation.method is {method!r}, whose own KV cache is not handed over; use {GUESSES_FROM_TEXT}"
        )
    degrees = [
        render_version(role_spec(spec, role, machine.name), machine).degrees
        for role in (CellRole.PREFILL, CellRole.DECODE)
    ]
    for one in degrees:
        if one.nodes > 1 or one.pp > 1:
            what = f"{one.nodes} nodes" if one.nodes > 1 else f"{one.pp} pipeline stages"
            raise InvalidVersion(f"{place} on {machine.name}: its cells have {what}; a handover takes cells of one")
    prefill, decode = degrees[0].tp, degrees[1].tp
    if max(prefill, decode) % min(prefill, decode):
        raise InvalidVersion(
            f"{place} on {machine.name}: tp is {prefill} of prefill and {decode} of decode cells; "
            "one must divide the other"
        )


def render_role(spec: VersionSpec, role: CellRole, machine: InstanceShape) -> Rendering:
    """The version as cells of this role run it on these machines.

    Raises:
        InvalidVersion: see `render_version`; and of a role apart, `check_apart`.
    """
    if role is not CellRole.MIXED:
        check_apart(spec, machine)
    return render_version(role_spec(spec, role, machine.name), machine)


def kv_layout(spec: VersionSpec, machine: InstanceShape, software: str = "") -> str:
    """Fingerprint of what cells of the version hand over on these machines, the same in both roles: two cells may pair
    only if theirs are equal. `software`: what the engine of the cell is, where that is known.

    Instance type, weights, data types, block size, how tensors are split in both roles, the connector and its version.

    Raises:
        InvalidVersion: nothing is handed over, see `check_apart`.
    """
    check_apart(spec, machine)
    spec = spec.on(machine.name)
    split = [_degrees(spec, role, machine).tp for role in (CellRole.PREFILL, CellRole.DECODE)]
    stated = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    return digest_of(
        {
            "instance_type": machine.name,
            "model": spec.model,
            "artifact": spec.artifact_digest or spec.artifact_uri,
            "engine": spec.engine,
            "software": software,
            "options": {name: stated[name] for name in OF_LAYOUT if name in stated},
            "quantization": dict(spec.quantization),
            "tp": split,
            "connector": CONNECTORS[spec.engine],
        }
    )


def _degrees(spec: VersionSpec, role: CellRole, machine: InstanceShape) -> Degrees:
    of_role = role_spec(spec, role, machine.name)
    return degrees_on(of_role.reference, of_role.parallelism, machine)
