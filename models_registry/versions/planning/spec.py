"""A model version as plain data, and its fields on one of its instance types; reads and checks `quantization`,
`adapters` and other JSON fields, with errors that name field and value. Model, context length, adapters and golden
prompts are the same on all instance types; other fields may differ (`by_type`). Pure: whether a version can run is
decided elsewhere, and so are conflicts of adapter names with other models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from engine_agent.protocol.engine_options import SGLANG_QUANTIZATIONS
from engine_agent.protocol.ingress_messages import ADAPTER_NAME
from engine_agent.protocol.manifest import BadArtifact
from engine_agent.protocol.messages import Artifact, PlanAdapter
from models_registry.artifacts.planner import DIGEST, parse_place


class InvalidVersion(ValueError):
    """A version that cannot be rendered; the text names field, value and rule."""


def one_of(names: Iterable[str], wrong: str) -> str:
    """`it must be one of a, b (did you mean b?)`, for the error about a wrong name."""
    known = list(names)
    close = get_close_matches(wrong, known, n=1)
    return f"it must be one of {', '.join(known)}" + (f" (did you mean {close[0]}?)" if close else "")


class FieldReader:
    """Reads one JSON object. `finish` rejects names that were not read. `where`: its place for errors, such as
    `llama@3: speculation`. Raises InvalidVersion if `values` is not an object."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise InvalidVersion(f"{where} is {values!r}; it must be an object")
        self._where = where
        self._values = values
        self._read: list[str] = []

    def wrong(self, name: str, rule: str) -> InvalidVersion:
        """The error that a field breaks a rule."""
        return InvalidVersion(f"{self._where}.{name} is {self._values.get(name)!r}; {rule}")

    def wrong_because(self, name: str, reason: str) -> InvalidVersion:
        """The error inside a field whose value is too long to repeat."""
        return InvalidVersion(f"{self._where}.{name}: {reason}")

    def given(self, name: str) -> Any:
        """The raw value, None if it is missing."""
        self._read.append(name)
        return self._values.get(name)

    def whole(self, name: str, *, default: int | None = None) -> int:
        """A whole number from 1; required without a default."""
        value = self.given(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "it must be a whole number from 1")
        return value

    def number(self, name: str, *, least: float, most: float, default: float) -> float:
        value = self.given(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"it must be a number from {least:g} to {most:g}")
        return float(value)

    def text(self, name: str, *, default: str | None = None) -> str:
        """A text that is not empty; required without a default."""
        value = self.given(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "it must be a text that is not empty")
        return value

    def choice(self, name: str, choices: Iterable[str], *, default: str | None = None) -> str:
        """One of these texts; required without a default."""
        allowed = list(choices)
        value = self.given(name)
        if value is None and default is not None:
            return default
        if value not in allowed:
            raise self.wrong(name, one_of(allowed, str(value)))
        return str(value)

    def flag(self, name: str) -> bool:
        value = self.given(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "it must be true or false")
        return bool(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.given(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "it must be an object")
        return value or {}

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.given(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.wrong(name, "it must be a list of texts")
        return tuple(value)

    def finish(self) -> None:
        """Reject names that were not read. Raises InvalidVersion if there is one; the text lists the known names."""
        for name in self._values:
            if name not in self._read:
                raise InvalidVersion(f"{self._where} names {name!r}; {one_of(self._read, name)}")


__all__ = ["BY_TYPE", "HeadCounts", "InvalidVersion", "VersionSpec"]

OF_AN_ENGINE = ("engine_options", "engine_env", "speculation", "quantization", "roles")
"""Fields in the terms of one engine. If an instance type states another engine, they start empty there."""
LAID_OVER = ("engine_options", "engine_env")
"""By type these are merged into the version's value, and null removes an entry; other fields are replaced."""
BY_TYPE = (
    "engine",
    "engine_build",
    "artifact_uri",
    "artifact_digest",
    "max_concurrency",
    "ready_timeout_s",
    *OF_AN_ENGINE,
)
"""Fields that may differ by instance type, in addition to `parallelism`."""
UNSTATED_VALUES: Mapping[str, tuple[Any, ...]] = {"artifact_digest": (None, "")}
"""An empty digest is not known yet."""
READY_TIMEOUT_MAX_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Counts in the model that degrees must divide; None is unknown and not checked.

    `attention` query heads, `kv` key-value heads, `layers` decoder layers."""

    attention: int | None = None
    kv: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A model version as planner input. `parallelism` maps instance type -> {degree: number}
    (`models_registry.versions.planning.machines.Degrees`), `by_type` instance type -> other fields that differ there.
    `allowances`: options and variables that admins allow in addition to the lists, by engine. `differs_on`: the
    instance type of this spec, if `by_type` has any entry; empty: equal on all. `modalities`: content of requests that
    it serves in addition to text."""

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
    engine_build: str = ""
    modalities: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """`model@version`, with the instance type if it differs; errors begin with it."""
        return f"{self.model}@{self.version}" + (f" on {self.differs_on}" if self.differs_on else "")

    @property
    def instance_types(self) -> tuple[str, ...]:
        return tuple(sorted(self.parallelism))

    @property
    def widened(self) -> tuple[str, ...]:
        """Options and variables that admins allow its engine."""
        return tuple(self.allowances.get(self.engine, ()))

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt with its answer: the engine's option, else the version's."""
        stated = (value for name, value in self.engine_options.items() if name.replace("-", "_") == "max_model_len")
        found = next(stated, None)
        return found if isinstance(found, int) and found > 0 else self.context_length

    def on(self, instance_type: str) -> "VersionSpec":
        """The version for this instance type only. Raises InvalidVersion if it does not name this instance type, or a
        field cannot be read."""
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
                f"{self.reference}: by_type.{instance_type} makes max_model_len {found.max_model_len} tokens, "
                f"but elsewhere it is {self.max_model_len}; it must be equal on every instance type, so state "
                "context_length and no max_model_len"
            )
        return found


def not_served(reference: str, parallelism: Mapping[str, Any], instance_type: str) -> InvalidVersion:
    """The error that a version does not name this instance type."""
    return InvalidVersion(
        f"{reference}: parallelism has no entry for instance type {instance_type!r} "
        f"(it has: {', '.join(sorted(parallelism)) or 'none'})"
    )


def read_by_type(spec: VersionSpec, instance_type: str) -> dict[str, Any]:
    """The fields of a version that differ on this instance type. Raises InvalidVersion if a field is unknown, a value
    has the wrong type, or `parallelism` lacks the instance type."""
    for kind in spec.by_type:
        if kind not in spec.parallelism:
            raise InvalidVersion(
                f"{spec.reference}: by_type names {kind!r}, which parallelism lacks; "
                f"{one_of(sorted(spec.parallelism), kind)}"
            )
    stated = spec.by_type.get(instance_type)
    if stated is None:
        return {}
    fields = FieldReader(f"{spec.reference}: by_type.{instance_type}", stated)
    values = {
        name: _value(fields, name) for name in BY_TYPE if fields.given(name) not in UNSTATED_VALUES.get(name, (None,))
    }
    fields.finish()
    return _changes(spec, values)


def _value(fields: FieldReader, name: str) -> Any:
    if name in OF_AN_ENGINE:
        return fields.mapping(name)
    if name == "engine_build" and fields.given(name) == "":
        return ""  # what is installed on nodes of this type
    if name == "max_concurrency":
        return fields.whole(name)
    if name == "ready_timeout_s":
        return fields.number(name, least=1, most=READY_TIMEOUT_MAX_S, default=READY_TIMEOUT_MAX_S)
    return fields.text(name)


def _changes(spec: VersionSpec, values: dict[str, Any]) -> dict[str, Any]:
    is_other_engine = values.get("engine", spec.engine) != spec.engine
    changes: dict[str, Any] = {**{name: {} for name in OF_AN_ENGINE}, "engine_build": ""} if is_other_engine else {}
    if "artifact_uri" in values:
        changes["artifact_digest"] = ""
    for name, value in values.items():
        is_laid_over = name in LAID_OVER and not is_other_engine
        changes[name] = (
            _merged_options(getattr(spec, name) if is_laid_over else {}, value) if name in LAID_OVER else value
        )
    return changes


def _merged_options(base: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Different spellings of an option name are the same option."""
    named = {name.replace("-", "_") for name in stated}
    kept = {name: value for name, value in base.items() if name.replace("-", "_") not in named}
    return kept | {name: value for name, value in stated.items() if value is not None}


def _roles_on(roles: Mapping[str, Any], instance_type: str) -> Mapping[str, Any]:
    """Roles without the degrees of other instance types. Invalid values stay, and are rejected later."""
    return {name: _role_on(stated, instance_type) for name, stated in roles.items()}


def _role_on(stated: Any, instance_type: str) -> Any:
    split = stated.get("parallelism") if isinstance(stated, Mapping) else None
    if not isinstance(split, Mapping):
        return stated
    return {**stated, "parallelism": {kind: degrees for kind, degrees in split.items() if kind == instance_type}}


NEURON_DTYPES = ("int8", "f8e4m3")
PER_CHANNEL = "per_channel_symmetric"
NEURON_SCHEMES = ("per_tensor_symmetric", PER_CHANNEL)


@dataclass(frozen=True, slots=True)
class VllmQuantization:
    """A method of vLLM or SGLang, by its name there. Not needed for checkpoints that state their quantization."""

    method: str


@dataclass(frozen=True, slots=True)
class NeuronQuantization:
    """Weights in `dtype`, computed in the model's type.

    `checkpoints_path` is the nodes' folder of quantized weights, which NxDI writes when it compiles. `unconverted`
    modules keep their type."""

    dtype: str
    scheme: str
    checkpoints_path: str
    unconverted: tuple[str, ...] = ()


Quantization = VllmQuantization | NeuronQuantization


def read_quantization(reference: str, engine: str, stated: Mapping[str, Any]) -> Quantization | None:
    """The quantization of a version; None if it has none. Raises InvalidVersion if the engine does not support it, or a
    field is missing, invalid or unknown."""
    if not stated:
        return None
    fields = FieldReader(f"{reference}: quantization", stated)
    read: Quantization
    if engine == "vllm":
        read = VllmQuantization(fields.text("method"))
    elif engine == "sglang":
        read = VllmQuantization(fields.choice("method", SGLANG_QUANTIZATIONS))
    elif engine == "neuron":
        read = _neuron(fields)
    else:
        raise InvalidVersion(
            f"{reference}: quantization is {dict(stated)!r}; engine {engine} does not support it, leave it empty"
        )
    fields.finish()
    return read


def _neuron(fields: FieldReader) -> NeuronQuantization:
    path = fields.text("checkpoints_path")
    if not path.startswith("/"):
        raise fields.wrong("checkpoints_path", "it must be an absolute path on the nodes")
    scheme, unconverted = fields.choice("scheme", NEURON_SCHEMES, default=PER_CHANNEL), fields.texts("unconverted")
    if unconverted and scheme != PER_CHANNEL:
        raise fields.wrong("unconverted", f"with scheme {scheme} NxDI quantizes all modules; it must be empty there")
    return NeuronQuantization(fields.choice("dtype", NEURON_DTYPES), scheme, path, unconverted)


ADAPTERS_MAX = 32
"""Per version: each is a name in every list of models and takes memory in every engine."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` (vLLM 0.32, `vllm/config/lora.py`); the engine reserves the next one above."""
USUAL_RANK = 16
"""vLLM's default, for an adapter without a rank."""
MOST_AT_ONCE = 8
"""Default of `max_loras`, the number of adapters in one step: each takes memory next to the weights."""
ENGINES_WITH_ADAPTERS = ("sim", "vllm")


@dataclass(frozen=True, slots=True)
class VersionAdapter:
    """One adapter. `artifact` None: no weights to load, only for `sim`; `rank` None: not stated."""

    name: str
    artifact: Artifact | None
    rank: int | None = None

    @property
    def planned(self) -> PlanAdapter:
        return PlanAdapter(self.name, self.artifact)


def adapter_names(stated: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of a stored version's adapters, which were checked before they were stored."""
    return tuple(str(one["name"]) for one in stated)


def read_adapters(
    reference: str, engine: str, stated: Sequence[Mapping[str, Any]], *, loads_weights: bool
) -> tuple[VersionAdapter, ...]:
    """The adapters of a version, in its order. `loads_weights`: the engine needs their artifacts. Raises InvalidVersion
    if the engine does not support adapters, there are too many, a field is missing, invalid or unknown, or a name is
    taken."""
    if not stated:
        return ()
    if engine not in ENGINES_WITH_ADAPTERS:
        having = " and ".join(ENGINES_WITH_ADAPTERS)
        raise InvalidVersion(
            f"{reference}: engine {engine} does not support adapters, {having} do; leave adapters empty"
        )
    if len(stated) > ADAPTERS_MAX:
        raise InvalidVersion(f"{reference}: adapters has {len(stated)}; the limit is {ADAPTERS_MAX}")
    read: dict[str, VersionAdapter] = {}
    for number, one in enumerate(stated, start=1):
        fields = FieldReader(f"{reference}: adapters.{number}", one)
        adapter = _adapter(fields, loads_weights=loads_weights)
        if adapter.name in read:
            raise fields.wrong("name", "another adapter of this version has that name")
        if adapter.name == reference.partition("@")[0]:
            raise fields.wrong("name", f"it is the name of the model {adapter.name} itself; choose another")
        read[adapter.name] = adapter
    return tuple(read.values())


def _adapter(fields: FieldReader, *, loads_weights: bool) -> VersionAdapter:
    name = fields.text("name")
    if not ADAPTER_NAME.fullmatch(name):
        raise fields.wrong("name", "it must be 1 to 64 letters, digits and ._:/@+-, the first a letter or digit")
    uri, digest = fields.given("artifact_uri") or "", fields.given("artifact_digest") or ""
    if loads_weights and not uri:
        raise fields.wrong("artifact_uri", "it must be the URI of the adapter's weights")
    try:
        place = parse_place(fields.text("artifact_uri")) if uri else None
    except BadArtifact as error:
        raise fields.wrong_because("artifact_uri", str(error)) from None
    if digest and (place is None or not isinstance(digest, str) or not DIGEST.fullmatch(digest)):
        rule = "it must be sha256: and 64 hexadecimal digits, or empty: validation computes it"
        raise fields.wrong("artifact_digest", rule)
    rank = fields.given("rank")
    if rank is not None and not 1 <= fields.whole("rank") <= RANKS[-1]:
        raise fields.wrong("rank", f"it must be at most {RANKS[-1]}")
    fields.finish()
    return VersionAdapter(name, Artifact(str(uri), str(digest)) if place else None, rank)


def vllm_adapter_options(adapters: Sequence[VersionAdapter]) -> dict[str, Any]:
    """vLLM's options for these adapters, without paths, which only a node knows. None without adapters."""
    if not adapters:
        return {}
    greatest = max(adapter.rank or USUAL_RANK for adapter in adapters)
    return {
        "enable_lora": True,
        "max_loras": min(len(adapters), MOST_AT_ONCE),
        "max_cpu_loras": len(adapters),  # otherwise an idle adapter is read from disk within a step
        "max_lora_rank": next(rank for rank in RANKS if rank >= greatest),
    }
