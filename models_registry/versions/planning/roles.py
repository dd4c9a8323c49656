"""Renders a version for each role, and fingerprints the KV layout that prefill cells hand over to decode cells. Both
roles have the same weights; a version's field `roles` states their differences: tensor parallelism, engine options,
concurrency. It rejects differences that would break a handover. The fleet decides how many cells have which role. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from engine_agent.protocol.states import CellRole
from models_registry.benchmarks.planning.workload import digest_of
from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.engine_arguments import Rendering, render_version
from models_registry.versions.planning.machines import Degrees, degrees_on
from models_registry.versions.planning.spec import FieldReader, InvalidVersion, VersionSpec, one_of
from models_registry.versions.planning.speculation import GUESSES_FROM_TEXT

APART = (CellRole.PREFILL.value, CellRole.DECODE.value)
CONNECTORS: Mapping[str, str] = MappingProxyType({"sim": "sim-1", "vllm": "NixlConnector-1"})
"""By engine: the connector between cells, and the version of its use. Other engines hand over nothing."""
OF_LAYOUT = ("block_size", "dtype", "kv_cache_dtype", "max_model_len", "quantization")
"""Engine options that determine layout or content of the KV cache, so they must be equal in every role."""


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """A role's differences from the version. `tp`: instance type -> tensor-parallel degree; `max_concurrency` None: the
    version's."""

    tp: Mapping[str, int]
    engine_options: Mapping[str, Any]
    max_concurrency: int | None = None


def role_spec(spec: VersionSpec, role: CellRole, instance_type: str) -> VersionSpec:
    """The version for cells of this role on this instance type. Raises InvalidVersion if it does not name the instance
    type, or its `roles` are invalid."""
    spec = spec.on(instance_type)
    options = read_roles(spec).get(role)
    return spec if options is None else with_role(spec, options)


def with_role(spec: VersionSpec, options: RoleOptions) -> VersionSpec:
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
    """Read the version's roles. Raises InvalidVersion if a role or field is unknown or breaks a rule; the text names
    it."""
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
                name, "it must be equal in cells that hand over; state it in engine_options of the version"
            )
    at_once = fields.whole("max_concurrency") if fields.given("max_concurrency") is not None else None
    fields.finish()
    return RoleOptions(split, options, at_once)


def role_concurrency(stored: Mapping[str, Any]) -> dict[str, int]:
    """Role -> concurrent requests of its cells, where they differ from the version's."""
    return {role: options["max_concurrency"] for role, options in stored.items() if options.get("max_concurrency")}


def apart_objection(spec: VersionSpec, machine: InstanceShape) -> str:
    """Why cells of this version cannot have roles on these machines; empty if they can."""
    try:
        check_apart(spec, machine)
    except InvalidVersion as wrong:
        return str(wrong)
    return ""


def check_apart(spec: VersionSpec, machine: InstanceShape) -> None:
    """Check that cells of the version can hand prompts over on these machines. Raises InvalidVersion if they cannot;
    the text says why, and what to change."""
    spec = spec.on(machine.name)
    place = f"{spec.reference} cannot have prefill and decode cells"
    if spec.engine not in CONNECTORS:
        raise InvalidVersion(f"{place}: engine {spec.engine} does not hand over, {' and '.join(CONNECTORS)} do")
    options = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    for name in ("kv_offloading_size", "kv_store_size", "sleep_idle_seconds"):
        if options.get(name) is not None:
            raise InvalidVersion(f"{place}: handover does not support engine_options.{name}; keep its cells mixed")
    if spec.adapters:
        raise InvalidVersion(f"{place}: handover does not support adapters; keep its cells mixed")
    method = spec.speculation.get("method")
    if method not in (None, GUESSES_FROM_TEXT):
        raise InvalidVersion(
            f"{place}: speculation.method is {method!r}, which has its own KV cache, and that is not handed "
            f"over; use {GUESSES_FROM_TEXT}"
        )
    degrees = [
        render_version(role_spec(spec, role, machine.name), machine).degrees
        for role in (CellRole.PREFILL, CellRole.DECODE)
    ]
    for one in degrees:
        if one.nodes > 1 or one.pp > 1:
            what = f"{one.nodes} nodes" if one.nodes > 1 else f"{one.pp} pipeline stages"
            raise InvalidVersion(f"{place} on {machine.name}: its cells have {what}; a handover supports one")
    prefill, decode = degrees[0].tp, degrees[1].tp
    if max(prefill, decode) % min(prefill, decode):
        raise InvalidVersion(
            f"{place} on {machine.name}: tp of prefill cells is {prefill} and of decode cells {decode}; one "
            "must divide the other"
        )


def render_role(spec: VersionSpec, role: CellRole, machine: InstanceShape) -> Rendering:
    """The version rendered for cells of this role on these machines. Raises InvalidVersion as `render_version` and, for
    prefill and decode, `check_apart` do."""
    if role is not CellRole.MIXED:
        check_apart(spec, machine)
    return render_version(role_spec(spec, role, machine.name), machine)


def kv_layout(spec: VersionSpec, machine: InstanceShape, software: str = "") -> str:
    """Fingerprint of the KV layout that cells of the version hand over on these machines, equal in both roles: only
    cells with equal fingerprints may pair. `software`: the cell's engine, if known.

    It covers instance type, weights, data types, block size, tensor parallelism of both roles, connector and its
    version. Raises InvalidVersion if nothing is handed over, see `check_apart`."""
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
