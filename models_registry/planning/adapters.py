"""What a model version says of LoRA adapters: small changes to the model's weights, each served under a name of its own
by the same engine. Reads and checks the field `adapters`; who else has a name is for the fleet. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.ingress_messages import ADAPTER_NAME
from engine_agent.protocol.manifest import BadArtifact
from engine_agent.protocol.messages import Artifact, PlanAdapter
from models_registry.planning.artifact_rules import DIGEST, parse_place
from models_registry.planning.fields import FieldReader
from models_registry.planning.version_spec import InvalidVersion

ADAPTERS_MAX = 32
"""Of one version: as many names in every list of models and every engine's memory."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be (vLLM 0.32, `vllm/config/lora.py`); the engine makes room for the next one above."""
USUAL_RANK = 16
"""Of an adapter that states none: vLLM's own default."""
MOST_AT_ONCE = 8
"""Adapters whose requests run in one step, unless the version says `max_loras`: each takes room beside the weights."""
ENGINES_WITH_ADAPTERS = ("sim", "vllm")


@dataclass(frozen=True, slots=True)
class VersionAdapter:
    """One adapter. `artifact` None: there are no weights to load, which only `sim` serves; `rank` None: not stated."""

    name: str
    artifact: Artifact | None
    rank: int | None = None

    @property
    def planned(self) -> PlanAdapter:
        return PlanAdapter(self.name, self.artifact)


def adapter_names(stated: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of adapters that a version was stored with, which were read before they were stored."""
    return tuple(str(one["name"]) for one in stated)


def read_adapters(
    reference: str, engine: str, stated: Sequence[Mapping[str, Any]], *, loads_weights: bool
) -> tuple[VersionAdapter, ...]:
    """The adapters of a version, in its order. `loads_weights`: the engine is one that needs their artifacts.

    Raises:
        InvalidVersion: the engine has none, there are too many, or a field is missing, wrong or unknown; or two have
            one name, or one has the model's.
    """
    if not stated:
        return ()
    if engine not in ENGINES_WITH_ADAPTERS:
        having = " and ".join(ENGINES_WITH_ADAPTERS)
        raise InvalidVersion(f"{reference}: engine {engine} serves no adapters, {having} do; leave adapters empty")
    if len(stated) > ADAPTERS_MAX:
        raise InvalidVersion(f"{reference}: adapters has {len(stated)}; a version may have {ADAPTERS_MAX}")
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
        raise fields.wrong("artifact_uri", "it must be the place of the adapter's weights")
    try:
        place = parse_place(fields.text("artifact_uri")) if uri else None
    except BadArtifact as error:
        raise fields.wrong_because("artifact_uri", str(error)) from None
    if digest and (place is None or not isinstance(digest, str) or not DIGEST.fullmatch(digest)):
        rule = "it must be sha256: and 64 hexadecimal digits, of what artifact_uri names; empty: validation computes it"
        raise fields.wrong("artifact_digest", rule)
    rank = fields.given("rank")
    if rank is not None and not 1 <= fields.whole("rank") <= RANKS[-1]:
        raise fields.wrong("rank", f"it must be at most {RANKS[-1]}")
    fields.finish()
    return VersionAdapter(name, Artifact(str(uri), str(digest)) if place else None, rank)


def vllm_adapter_options(adapters: Sequence[VersionAdapter]) -> dict[str, Any]:
    """vLLM's options for these adapters, less where they lie, which only a node knows. None without any."""
    if not adapters:
        return {}
    greatest = max(adapter.rank or USUAL_RANK for adapter in adapters)
    return {
        "enable_lora": True,
        "max_loras": min(len(adapters), MOST_AT_ONCE),
        "max_cpu_loras": len(adapters),  # else one that was not used lately is read from disk within a step
        "max_lora_rank": next(rank for rank in RANKS if rank >= greatest),
    }
