"""What a version is on each instance type it names: its degrees and engine arguments, or why it cannot be served."""

from collections.abc import Mapping
from dataclasses import dataclass

from models_registry.models import ModelVersion
from models_registry.planning.engine_arguments import render_version
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.parallelism import Degrees
from models_registry.planning.version_spec import InvalidVersion


@dataclass(frozen=True, slots=True)
class InstanceRendering:
    """One instance type. Where `problem` says something, there are no degrees and no arguments."""

    instance_type: str
    problem: str = ""
    degrees: Degrees | None = None
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def renderings(version: ModelVersion, machines: Mapping[str, InstanceShape]) -> list[InstanceRendering]:
    """By instance type, on the machines that there are."""
    spec = version.spec()
    rendered = []
    for name in sorted(spec.parallelism):
        if name not in machines:
            known = ", ".join(sorted(machines))
            rendered.append(InstanceRendering(name, f"there is no instance type {name!r}; there are {known}"))
            continue
        try:
            rendering = render_version(spec, machines[name])
        except InvalidVersion as error:
            rendered.append(InstanceRendering(name, problem=str(error)))
        else:
            rendered.append(InstanceRendering(name, "", rendering.degrees, rendering.plan.args, rendering.notes))
    return rendered
