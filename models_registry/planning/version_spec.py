"""What a model version says, as plain data, and what it is on one of its instance types. Whether it can be run there is
judged elsewhere.

One version is one behaviour: model, length of context, adapters and golden prompts are the same everywhere. How it is
computed may differ by instance type, as `by_type` says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models_registry.planning.fields import FieldReader, InvalidVersion, one_of

__all__ = ["BY_TYPE", "HeadCounts", "InvalidVersion", "VersionSpec"]

OF_AN_ENGINE = ("engine_options", "engine_env", "speculation", "quantization", "roles")
"""Fields in the terms of one engine. An instance type that states another engine begins without what the version says
in them."""
LAID_OVER = ("engine_options", "engine_env")
"""Stated by type, they add to what the version says, and null takes one away; other fields take its place."""
BY_TYPE = ("engine", "artifact_uri", "artifact_digest", "max_concurrency", "ready_timeout_s", *OF_AN_ENGINE)
"""What may differ by instance type, beside the degrees of `parallelism`."""
UNSAID: Mapping[str, tuple[Any, ...]] = {"artifact_digest": (None, "")}
"""Of a digest an empty text says that it is not known yet."""
READY_TIMEOUT_MAX_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """What the model has of things that degrees must divide; None where unknown, and then nothing is checked.

    `attention` query heads, `kv` key-value heads, `layers` decoder layers.
    """

    attention: int | None = None
    kv: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A model version as planners see it. `parallelism` maps instance type -> {degree: number} (see
    `models_registry.planning.parallelism.Degrees`); `by_type` instance type -> what else differs there. `allowances`:
    names of options and variables that admins allow beyond the lists, by engine. `differs_on`: the instance type that
    this is the version on, where `by_type` said something of any; empty: it is the same on all."""

    model: str
    version: str
    engine: str
    artifact_uri: str
    artifact_digest: str
    context_length: int
    max_concurrency: int
    ready_timeout_s: float
    parallelism: Mapping[str, Mapping[str, int]]
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    engine_env: Mapping[str, str] = field(default_factory=dict)
    golden_prompts: tuple[tuple[str, str], ...] = ()
    golden_waiver: str = ""
    heads: HeadCounts = HeadCounts()
    speculation: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[Mapping[str, Any], ...] = ()
    roles: Mapping[str, Any] = field(default_factory=dict)
    by_type: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allowances: Mapping[str, Sequence[str]] = field(default_factory=dict)
    differs_on: str = ""

    @property
    def reference(self) -> str:
        """`model@version`, and the instance type where it is not the same on all: what errors begin with."""
        return f"{self.model}@{self.version}" + (f" on {self.differs_on}" if self.differs_on else "")

    @property
    def instance_types(self) -> tuple[str, ...]:
        return tuple(sorted(self.parallelism))

    @property
    def widened(self) -> tuple[str, ...]:
        """What admins allow its engine beyond the lists."""
        return tuple(self.allowances.get(self.engine, ()))

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt with its answer, as the engine is told: its own option wins."""
        stated = (value for name, value in self.engine_options.items() if name.replace("-", "_") == "max_model_len")
        found = next(stated, None)
        return found if isinstance(found, int) and found > 0 else self.context_length

    def on(self, instance_type: str) -> "VersionSpec":
        """The version as it is on this instance type, which it then names alone.

        Raises:
            InvalidVersion: it says nothing of this instance type, or something of it cannot be read.
        """
        if instance_type not in self.parallelism:
            raise not_served(self.reference, self.parallelism, instance_type)
        changes = read_by_type(self, instance_type)
        found = replace(
            self,
            parallelism={instance_type: self.parallelism[instance_type]},
            by_type={},
            differs_on=instance_type if self.by_type else self.differs_on,
            **changes,
        )
        found = replace(found, roles=_roles_on(found.roles, instance_type))
        if found.max_model_len != self.max_model_len:
            raise InvalidVersion(
                f"{self.reference}: by_type.{instance_type} makes the longest text {found.max_model_len} tokens, and "
                f"elsewhere it is {self.max_model_len}; a version serves the same on every instance type, so state "
                "context_length and no max_model_len"
            )
        return found


def not_served(reference: str, parallelism: Mapping[str, Any], instance_type: str) -> InvalidVersion:
    """The error that says that a version does not name this instance type."""
    return InvalidVersion(
        f"{reference}: parallelism has no entry for instance type {instance_type!r} "
        f"(it has: {', '.join(sorted(parallelism)) or 'none'})"
    )


def read_by_type(spec: VersionSpec, instance_type: str) -> dict[str, Any]:
    """The fields of a version that are others on this instance type, with their values there.

    Raises:
        InvalidVersion: an unknown field, a value of the wrong kind, or an instance type that `parallelism` lacks.
    """
    for kind in spec.by_type:
        if kind not in spec.parallelism:
            raise InvalidVersion(
                f"{spec.reference}: by_type names {kind!r}, and parallelism does not, so it is not served there; "
                f"{one_of(sorted(spec.parallelism), kind)}"
            )
    stated = spec.by_type.get(instance_type)
    if stated is None:
        return {}
    fields = FieldReader(f"{spec.reference}: by_type.{instance_type}", stated)
    values = {name: _value(fields, name) for name in BY_TYPE if fields.given(name) not in UNSAID.get(name, (None,))}
    fields.finish()
    return _changes(spec, values)


def _value(fields: FieldReader, name: str) -> Any:
    if name in OF_AN_ENGINE:
        return fields.mapping(name)
    if name == "max_concurrency":
        return fields.whole(name)
    if name == "ready_timeout_s":
        return fields.number(name, least=1, most=READY_TIMEOUT_MAX_S, default=READY_TIMEOUT_MAX_S)
    return fields.text(name)


def _changes(spec: VersionSpec, values: dict[str, Any]) -> dict[str, Any]:
    is_other_engine = values.get("engine", spec.engine) != spec.engine
    changes: dict[str, Any] = {name: {} for name in OF_AN_ENGINE} if is_other_engine else {}
    if "artifact_uri" in values:
        changes["artifact_digest"] = ""
    for name, value in values.items():
        is_laid_over = name in LAID_OVER and not is_other_engine
        changes[name] = _laid_over(getattr(spec, name) if is_laid_over else {}, value) if name in LAID_OVER else value
    return changes


def _laid_over(base: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Options of one name are one, however it is spelled."""
    named = {name.replace("-", "_") for name in stated}
    kept = {name: value for name, value in base.items() if name.replace("-", "_") not in named}
    return kept | {name: value for name, value in stated.items() if value is not None}


def _roles_on(roles: Mapping[str, Any], instance_type: str) -> Mapping[str, Any]:
    """What is said of roles, without the degrees of other instance types; what is no object stays, to be refused."""
    return {name: _role_on(stated, instance_type) for name, stated in roles.items()}


def _role_on(stated: Any, instance_type: str) -> Any:
    split = stated.get("parallelism") if isinstance(stated, Mapping) else None
    if not isinstance(split, Mapping):
        return stated
    return {**stated, "parallelism": {kind: degrees for kind, degrees in split.items() if kind == instance_type}}
