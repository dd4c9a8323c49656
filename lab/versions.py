"""A model version that tests and benches vary."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.machines import degrees_on
from models_registry.versions.planning.neuron_configuration import neuron_configuration
from models_registry.versions.planning.spec import HeadCounts, VersionSpec
from models_registry.versions.planning.speculation import read_speculation

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


GOLDEN = Path(__file__).parent / "neuron_golden"
NOT_SERVED = "medusa"
"""NxDI can be configured for it, and no server that we start can serve it."""
EXAMPLES = sorted(path.stem for path in GOLDEN.glob("*.json") if path.stem != NOT_SERVED)
JSON_FLAGS = ("--additional-config", "--speculative-config")


class Example:
    def __init__(self, content: Mapping[str, Any]) -> None:
        self.documented: Mapping[str, Any] = content["documented"]
        self.rendered: Any = content.get("rendered")
        machine = content["machine"]
        self.machine = INSTANCE_TYPES[machine] if isinstance(machine, str) else InstanceShape(**machine)
        version = dict(content["version"])
        self.spec = VersionSpec(**{**version, "heads": HeadCounts(**version["heads"])})


def example(name: str) -> Example:
    return Example(json.loads((GOLDEN / f"{name}.json").read_text()))


def rendered(given: Example) -> dict[str, Any]:
    """Our arguments by flag, JSON ones decoded; a flag without a value is true."""
    args = render_version(given.spec, given.machine).plan.args
    found: dict[str, Any] = {}
    for position, arg in enumerate(args):
        if arg.startswith("--"):
            value = args[position + 1] if position + 1 < len(args) else "--"
            found[arg] = True if value.startswith("--") else json.loads(value) if arg in JSON_FLAGS else value
    return found


def configured(given: Example) -> dict[str, Any]:
    spec = given.spec
    speculation = read_speculation(spec.reference, spec.engine, spec.speculation)
    return neuron_configuration(spec, degrees_on(spec.reference, spec.parallelism, given.machine), speculation, None)
