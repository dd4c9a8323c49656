"""A model version that tests and benches vary."""

from dataclasses import replace
from typing import Any

from models_registry.planning.instance_types import INSTANCE_TYPES, InstanceShape
from models_registry.planning.version_spec import HeadCounts, VersionSpec

TRN1 = INSTANCE_TYPES["trn1.32xlarge"]
INF2 = INSTANCE_TYPES["inf2.48xlarge"]
P5 = INSTANCE_TYPES["p5.48xlarge"]
LOCAL = INSTANCE_TYPES["local.cpu"]


def spec(engine: str, machine: InstanceShape, degrees: dict[str, Any] | None = None, **changes: Any) -> VersionSpec:
    """A version of 64 query heads and 8 KV heads on these machines, with these degrees."""
    plain = VersionSpec(
        model="llama",
        version="3",
        engine=engine,
        artifact_uri="s3://models/llama-3",
        artifact_digest="sha256:ab",
        context_length=2048,
        max_concurrency=16,
        ready_timeout_s=600.0,
        parallelism={machine.name: degrees or {}},
        heads=HeadCounts(attention=64, kv=8, layers=80),
    )
    return replace(plain, **changes)
