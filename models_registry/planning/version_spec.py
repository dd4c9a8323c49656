"""What a model version says, as plain data. Decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class InvalidVersion(ValueError):
    """A version that cannot be rendered; the text names field, value and rule."""


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
    `models_registry.planning.parallelism.Degrees`). `widened`: names of options and variables that admins allow this
    engine beyond the lists."""

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
    widened: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        return f"{self.model}@{self.version}"

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt with its answer, as the engine is told: its own option wins."""
        stated = (value for name, value in self.engine_options.items() if name.replace("-", "_") == "max_model_len")
        found = next(stated, None)
        return found if isinstance(found, int) and found > 0 else self.context_length
