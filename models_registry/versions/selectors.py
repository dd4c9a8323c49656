"""Reads models, versions, renderings, allowances and calibrations, in a constant number of queries; and defines the
hook by which the fleet tells the registry who uses a version. The registry never imports the fleet. Without a
registered fleet the hook raises: it never reports "not in use". Never writes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from django.db.models import Prefetch, Q, QuerySet

from engine_agent.protocol.manifest import (
    DIGEST_PREFIX,
    MANIFEST_NAME,
    MOST_MANIFEST_BYTES,
    BadArtifact,
    is_sha256,
    parse_manifest,
)
from kernel.refusals import InvalidInput
from models_registry.artifacts.planner import ArtifactLimits, Place, check_manifest, check_source, parse_place
from models_registry.instance_types.planner import InstanceShape, unknown_type_text
from models_registry.versions.models import (
    CheckpointRecord,
    EngineAllowance,
    Model,
    ModelVersion,
    SpeculationCalibration,
    Validation,
)
from models_registry.versions.planning.checkpoint import Checkpoint
from models_registry.versions.planning.lifecycle import NO_CHECKPOINTS, artifacts_of, fitted_rendering
from models_registry.versions.planning.machines import Degrees, degrees_on
from models_registry.versions.planning.memory import ENGINES_WITH_ARITHMETIC, MemoryEstimate, estimate_memory
from models_registry.versions.planning.proposals import Proposal, propose
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

Uses = Callable[[int], list[str]]
"""Id of a version -> its users (`deployment smollm2`); empty if there are none."""


@dataclass
class _Registered:
    uses: Uses | None = None


_fleet = _Registered()


def register_version_uses(uses: Uses) -> None:
    """Called once, when the fleet's app is ready."""
    _fleet.uses = uses


def version_uses(version_id: int) -> list[str]:
    """Users of a version, as operators name them. Raises LookupError if no fleet has registered."""
    if _fleet.uses is None:
        raise LookupError("no fleet has registered the users of model versions")
    return _fleet.uses(version_id)


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
    """The version `model@version`, or None."""
    model, _, version = reference.partition("@")
    return versions.filter(model_id=model, version=version).first()


def version_stated(reference: str, *, field: str, versions: QuerySet[ModelVersion] | None = None) -> ModelVersion:
    """The version that a request names in this field, from `versions` or all. Raises InvalidInput if it does not
    exist."""
    version = version_by_reference(ModelVersion.objects.all() if versions is None else versions, reference)
    if version is None:
        message = f"unknown model version {reference!r}; the form is model@version"
        raise InvalidInput(field=field, rule="exists", message=message)
    return version


@dataclass(frozen=True, slots=True)
class InstanceRendering:
    """The version on one instance type. With a `problem` there are no degrees and arguments, and no engine if its
    fields cannot be read."""

    instance_type: str
    problem: str = ""
    engine: str = ""
    artifact_uri: str = ""
    artifact_digest: str = ""
    max_concurrency: int = 0
    degrees: Degrees | None = None
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def checkpoints_of(spec: VersionSpec) -> dict[str, Checkpoint]:
    """Facts of the version's artifacts on all its instance types, by URI. An artifact without a digest is the one that
    was read last. One query."""
    return stored_checkpoints({(each.artifact_uri, each.artifact_digest) for each in _on_every_type(spec)})


def stored_checkpoints(wanted: set[tuple[str, str]]) -> dict[str, Checkpoint]:
    """Facts of artifacts by URI, for pairs of URI and digest. One query."""
    rows = CheckpointRecord.objects.filter(uri__in={uri for uri, _ in wanted}).order_by("-id")
    found: dict[str, Checkpoint] = {}
    for row in rows:
        if row.facts and row.uri not in found and {(row.uri, row.digest), (row.uri, "")} & wanted:
            found[row.uri] = Checkpoint.from_json(row.facts)
    return found


def _on_every_type(spec: VersionSpec) -> Iterator[VersionSpec]:
    yield spec
    for kind in spec.instance_types:
        with suppress(InvalidVersion):
            yield spec.on(kind)


@dataclass(frozen=True, slots=True)
class CellMemory:
    """Memory of one device on an instance type of the version. `memory` None: no arithmetic there, `problem` says why;
    otherwise `problem` says why no cell is possible."""

    instance_type: str
    engine: str = ""
    problem: str = ""
    memory: MemoryEstimate | None = None


@dataclass(frozen=True, slots=True)
class VersionMemory:
    """`problem`: why there is neither `checkpoint` nor arithmetic."""

    version: str
    problem: str
    checkpoint: Checkpoint | None
    cells: tuple[CellMemory, ...] = ()
    proposals: tuple[Proposal, ...] = ()

    @property
    def fitting(self) -> tuple[Proposal, ...]:
        return tuple(each for each in self.proposals if not each.problem)

    @property
    def impossible(self) -> tuple[Proposal, ...]:
        return tuple(each for each in self.proposals if each.problem)


def version_memory(version: ModelVersion, machines: Mapping[str, InstanceShape]) -> VersionMemory:
    """The memory that the version needs on its instance types, and proposals for all existing ones. Two queries."""
    spec = version.spec()
    checkpoints = checkpoints_of(spec)
    own = checkpoints.get(spec.artifact_uri)
    if own is None:
        return VersionMemory(version.reference, _without_checkpoint(spec), None)
    cells = tuple(_cell_memory(spec, name, machines, checkpoints) for name in spec.instance_types)
    return VersionMemory(version.reference, "", own, cells, propose(spec, own, machines))


def _without_checkpoint(spec: VersionSpec) -> str:
    if not spec.artifact_uri:
        return "it names no artifact"
    row = CheckpointRecord.objects.filter(uri=spec.artifact_uri).order_by("-id").first()
    return row.problem if row is not None and row.problem else "validation has not read its artifact yet"


def _cell_memory(
    spec: VersionSpec, name: str, machines: Mapping[str, InstanceShape], checkpoints: Mapping[str, Checkpoint]
) -> CellMemory:
    if name not in machines:
        return CellMemory(name, problem=f"unknown instance type {name!r}")
    try:
        on_type = spec.on(name)
        checkpoint = checkpoints.get(on_type.artifact_uri)
        degrees = degrees_on(spec.reference, spec.parallelism, machines[name])
    except InvalidVersion as error:
        return CellMemory(name, problem=str(error))
    if checkpoint is None or on_type.engine not in ENGINES_WITH_ARITHMETIC:
        reason = f"engine {on_type.engine} has no arithmetic" if checkpoint else _without_checkpoint(on_type)
        return CellMemory(name, on_type.engine, reason)
    memory = estimate_memory(on_type, checkpoint, degrees, machines[name])
    try:
        fitted_rendering(spec, machines[name], checkpoints)
    except InvalidVersion as error:
        return CellMemory(name, on_type.engine, str(error), memory)
    return CellMemory(name, on_type.engine, "", memory)


def renderings(
    version: ModelVersion,
    machines: Mapping[str, InstanceShape],
    checkpoints: Mapping[str, Checkpoint] = NO_CHECKPOINTS,
) -> list[InstanceRendering]:
    """Renderings by instance type, on existing machines; with `checkpoints`, checked against them."""
    spec = version.spec()
    return [_rendered(spec, name, machines, checkpoints) for name in spec.instance_types]


def _rendered(
    spec: VersionSpec, name: str, machines: Mapping[str, InstanceShape], checkpoints: Mapping[str, Checkpoint]
) -> InstanceRendering:
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
        return replace(found, problem=unknown_type_text(name, machines))
    try:
        rendering = fitted_rendering(spec, machines[name], checkpoints)
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
    """The newest calibration, without its raw ranks; None before the first."""
    return version.calibrations.defer("document").order_by("-id").first()


def chains_expected(versions: Iterable[int]) -> dict[int, dict[str, tuple[float, ...]]]:
    """For calibrated versions: task -> tokens per step by number of guessed tokens, from 0 on."""
    rows = SpeculationCalibration.objects.filter(version__in=versions).order_by("id").values_list("version", "figures")
    return {
        version: {str(each["name"]): tuple(map(float, each["chain"])) for each in figures} for version, figures in rows
    }


def weights_handed_out(hex_digest: str, sources: Iterable[Place]) -> dict[str, Path]:
    """The files, by path, of weights that a version names; empty if this host has no such folder in its artifact
    sources, or a file is missing. One query. Reads the manifest and no other file."""
    digest = f"{DIGEST_PREFIX}{hex_digest}"
    if not is_sha256(hex_digest):
        return {}
    roots = [Place("file", "", str(Path(each.path).resolve())) for each in sources if each.scheme == "file"]
    stated = Q(artifact_digest=digest)
    for column in ("speculation", "adapters", "by_type"):
        stated |= Q(**{f"{column}__icontains": digest})
    for version in ModelVersion.objects.filter(stated):
        for artifact in artifacts_of(version.spec()):
            if artifact.digest == digest and artifact.uri.startswith("file:"):
                with suppress(BadArtifact, InvalidVersion, OSError):
                    return _files_of(parse_place(artifact.uri), digest, roots)
    return {}


def _files_of(place: Place, digest: str, roots: Sequence[Place]) -> dict[str, Path]:
    """Raises BadArtifact if a file is outside the roots, or this is another artifact. Raises OSError if a file is
    missing."""

    def inside(path: str) -> Path:
        real = (Path(place.path) / path).resolve(strict=True)
        check_source(Place("file", "", str(real)), roots)
        if not real.is_file():
            raise BadArtifact(f"{real} is not a file")
        return real

    listed = inside(MANIFEST_NAME)
    if listed.stat().st_size > MOST_MANIFEST_BYTES:
        raise BadArtifact(f"{listed} has more than {MOST_MANIFEST_BYTES} bytes")
    manifest = parse_manifest(listed.read_bytes(), str(listed))
    check_manifest(place, manifest, digest, ArtifactLimits())
    return {MANIFEST_NAME: listed, **{path: inside(path) for path in manifest.files}}
