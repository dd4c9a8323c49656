"""What a benchmark is known by, and which states it has. Pure.

Two benchmarks of one key measured the same thing and may be compared; neither replaces the other. Those that agree in
all but the version compare versions: `conditions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kernel.tones import Tone
from models_registry.planning.version_spec import VersionSpec
from models_registry.planning.workload import digest_of


class BenchmarkState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


BENCHMARK_OPEN = frozenset({BenchmarkState.QUEUED, BenchmarkState.RUNNING})
BENCHMARK_TONE: Mapping[BenchmarkState, Tone] = MappingProxyType(
    {
        BenchmarkState.QUEUED: Tone.IDLE,
        BenchmarkState.RUNNING: Tone.MOVING,
        BenchmarkState.DONE: Tone.OK,
        BenchmarkState.FAILED: Tone.BAD,
        BenchmarkState.CANCELLED: Tone.IDLE,
    }
)


@dataclass(frozen=True, slots=True)
class BenchmarkKey:
    """`version` and `workload` are digests; `fingerprint` is that of the machines with the engine's software, without
    what the version states itself; `slo` its sentence. `split`: how many cells had which role; empty: all were mixed.
    """

    version: str
    instance_type: str
    fingerprint: str
    workload: str
    slo: str
    seed: int
    split: str = ""

    @property
    def digest(self) -> str:
        return digest_of([self.version, *self._conditions])

    @property
    def conditions(self) -> str:
        """Digest of all but the version."""
        return digest_of(self._conditions)

    @property
    def _conditions(self) -> list[Any]:
        own = [self.instance_type, self.fingerprint, self.workload, self.slo, self.seed]
        return [*own, self.split] if self.split else own


@dataclass(frozen=True, slots=True)
class ComparedGoodput:
    """Two versions under the same conditions: requests a second of a cell, 0 where no rate held. `label`: what was
    sent, and within which objective."""

    label: str
    before: float
    after: float


def version_digest(spec: VersionSpec, instance_type: str) -> str:
    """Digest of what a cell of a version computes with on an instance type, whatever the version is called.

    Raises:
        InvalidVersion: it is not served there.
    """
    spec = spec.on(instance_type)
    return digest_of(
        {
            "model": spec.model,
            "engine": spec.engine,
            "artifact": spec.artifact_digest or spec.artifact_uri,
            "context_length": spec.context_length,
            "max_concurrency": spec.max_concurrency,
            "parallelism": dict(spec.parallelism[instance_type]),
            "options": dict(spec.engine_options),
            "env": dict(spec.engine_env),
            "speculation": dict(spec.speculation),
            "quantization": dict(spec.quantization),
            "adapters": [dict(adapter) for adapter in spec.adapters],
            **({"roles": dict(spec.roles)} if spec.roles else {}),
        }
    )
