"""What only the fleet knows of versions: which instance types there are, and what uses a version. The fleet registers
both.

The registry lies below the fleet and imports nothing of it. Without a registered fleet every call is an error,
never "not in use".

Models and their versions as readers see them, in a number of queries that does not grow with their number.

What a version is on each instance type it names: its degrees and engine arguments, or why it cannot be served.

What admins allow engines beyond the lists of `engine_agent.protocol.engine_options`.

Calibrations as readers see them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from django.db.models import Prefetch, QuerySet

from kernel.refusals import InvalidInput
from models_registry.versions.models import EngineAllowance, Model, ModelVersion, SpeculationCalibration, Validation
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.machines import Degrees, InstanceShape
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

Uses = Callable[[int], list[str]]
"""Id of a version -> what uses it, as operators name it (`deployment smollm2`); empty if nothing does."""
InstanceShapes = Callable[[], Mapping[str, InstanceShape]]


@dataclass
class _Registered:
    uses: Uses | None = None
    shapes: InstanceShapes | None = None


_fleet = _Registered()


def register_fleet_hooks(*, uses: Uses, shapes: InstanceShapes) -> None:
    """Called once, when the fleet's app is ready."""
    _fleet.uses, _fleet.shapes = uses, shapes


def version_uses(version_id: int) -> list[str]:
    """What uses a version, as operators name it.

    Raises:
        LookupError: no fleet has registered.
    """
    if _fleet.uses is None:
        raise LookupError("no fleet has registered who uses model versions")
    return _fleet.uses(version_id)


def instance_shapes() -> Mapping[str, InstanceShape]:
    """The instance types that there are, by name.

    Raises:
        LookupError: no fleet has registered.
    """
    if _fleet.shapes is None:
        raise LookupError("no fleet has registered its instance types")
    return _fleet.shapes()


_LAST = "last_validations"


def models_described() -> QuerySet[Model]:
    """Models with their versions, newest first: two queries."""
    versions = ModelVersion.objects.order_by("-id")
    return Model.objects.prefetch_related(Prefetch("versions", queryset=versions))


def versions_described() -> QuerySet[ModelVersion]:
    """Versions, each with its last validation (see `latest_validation`): two queries."""
    last = Validation.objects.order_by("-id").defer("checked")[:1]
    return ModelVersion.objects.prefetch_related(Prefetch("validations", queryset=last, to_attr=_LAST))


def latest_validation(version: ModelVersion) -> Validation | None:
    """The last validation of a version of `versions_described`, None before the first one."""
    return next(iter(getattr(version, _LAST)), None)


def version_by_reference(versions: QuerySet[ModelVersion], reference: str) -> ModelVersion | None:
    """The version that `model@version` names, or None."""
    model, _, version = reference.partition("@")
    return versions.filter(model_id=model, version=version).first()


def version_stated(reference: str, *, field: str, versions: QuerySet[ModelVersion] | None = None) -> ModelVersion:
    """The version that a request names in this field, of `versions` or of all.

    Raises:
        InvalidInput: there is none.
    """
    version = version_by_reference(ModelVersion.objects.all() if versions is None else versions, reference)
    if version is None:
        message = f"there is no model version {reference!r}; it reads model@version"
        raise InvalidInput(field=field, rule="exists", message=message)
    return version


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


def engine_allowances() -> Mapping[str, Sequence[str]]:
    """Engine -> names of options and variables, in a fixed order. One query."""
    allowed: dict[str, list[str]] = {}
    for engine, name in EngineAllowance.objects.order_by("engine", "name").values_list("engine", "name"):
        allowed.setdefault(engine, []).append(name)
    return allowed


def latest_calibration(version: ModelVersion) -> SpeculationCalibration | None:
    """The one that counts, without the ranks that it is made of; None before the first."""
    return version.calibrations.defer("document").order_by("-id").first()


def chains_expected(versions: Iterable[int]) -> dict[int, dict[str, tuple[float, ...]]]:
    """Of versions that are calibrated: task -> tokens of a step by how many are guessed, from none on."""
    rows = SpeculationCalibration.objects.filter(version__in=versions).order_by("id").values_list("version", "figures")
    return {
        version: {str(each["name"]): tuple(map(float, each["chain"])) for each in figures} for version, figures in rows
    }
