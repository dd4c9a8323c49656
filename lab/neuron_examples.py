"""Examples of the Neuron documentation, each with the version that should render to it.

The files are in `neuron_golden`. `documented` holds what the page at `source` says; `rendered` is everything that we
make of the version.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models_registry.planning.engine_arguments import render_version
from models_registry.planning.instance_types import INSTANCE_TYPES, InstanceShape
from models_registry.planning.neuron_configuration import neuron_configuration
from models_registry.planning.parallelism import degrees_on
from models_registry.planning.speculation import read_speculation
from models_registry.planning.version_spec import HeadCounts, VersionSpec

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
