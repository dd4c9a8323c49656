"""What a version is on each instance type it names: its degrees and engine arguments, or why it cannot be served."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models_registry.models import ModelVersion
from models_registry.planning.engine_arguments import render_version
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.parallelism import Degrees
from models_registry.planning.version_spec import InvalidVersion, VersionSpec


@dataclass(frozen=True, slots=True)
class InstanceRendering:
    """One instance type, with what the version is there. Where `problem` says something, there are no degrees and no
    arguments; where nothing of it can be read, no engine either."""

    instance_type: str
    problem: str = ""
    engine: str = ""
    artifact_uri: str = ""
    artifact_digest: str = ""
    max_concurrency: int = 0
    degrees: Degrees | None = None
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def renderings(version: ModelVersion, machines: Mapping[str, InstanceShape]) -> list[InstanceRendering]:
    """By instance type, on the machines that there are."""
    spec = version.spec()
    return [_rendered(spec, name, machines) for name in spec.instance_types]


def _rendered(spec: VersionSpec, name: str, machines: Mapping[str, InstanceShape]) -> InstanceRendering:
    try:
        on_type = spec.on(name)
    except InvalidVersion as error:
        return InstanceRendering(name, str(error))
    found = InstanceRendering(
        name,
        engine=on_type.engine,
        artifact_uri=on_type.artifact_uri,
        artifact_digest=on_type.artifact_digest,
        max_concurrency=on_type.max_concurrency,
    )
    if name not in machines:
        return replace(found, problem=f"there is no instance type {name!r}; there are {', '.join(sorted(machines))}")
    try:
        rendering = render_version(on_type, machines[name])
    except InvalidVersion as error:
        return replace(found, problem=str(error))
    return replace(found, degrees=rendering.degrees, arguments=rendering.plan.args, notes=rendering.notes)
