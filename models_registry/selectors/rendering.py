"""What a version is on each instance type it names: its degrees and engine arguments, or why it cannot be served."""

from dataclasses import dataclass

from models_registry.models import ModelVersion
from models_registry.planning.engine_arguments import render_version
from models_registry.planning.instance_types import INSTANCE_TYPES
from models_registry.planning.parallelism import Degrees
from models_registry.planning.versions import InvalidVersion


@dataclass(frozen=True, slots=True)
class InstanceRendering:
    """One instance type. Where `problem` says something, there are no degrees and no arguments."""

    instance_type: str
    problem: str = ""
    degrees: Degrees | None = None
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def renderings(version: ModelVersion) -> list[InstanceRendering]:
    """By instance type. Types without public figures are not rendered; they are checked where they are deployed."""
    spec = version.spec()
    rendered = []
    for name in sorted(spec.parallelism):
        if name not in INSTANCE_TYPES:
            rendered.append(InstanceRendering(name, notes=("Checked when it is deployed: not in the table of types.",)))
            continue
        try:
            found = render_version(spec, INSTANCE_TYPES[name])
        except InvalidVersion as error:
            rendered.append(InstanceRendering(name, problem=str(error)))
        else:
            rendered.append(InstanceRendering(name, "", found.degrees, found.plan.args, found.notes))
    return rendered
