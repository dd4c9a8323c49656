"""Reads engine builds: those of orders, whether versions may name them, and the files that are handed out to agents."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from engine_agent.protocol.engine_builds import BUILD_FILE, EXTERNAL, GENERIC_PREFIX, part_names
from engine_agent.protocol.engine_builds import EngineBuild as OrderedBuild
from engine_agent.protocol.manifest import DIGEST_PREFIX, MANIFEST_NAME, BadArtifact
from models_registry.artifacts.planner import Place, check_source, parse_place
from models_registry.builds.models import EngineBuild
from models_registry.instance_types.planner import NEURON
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import VersionState
from models_registry.versions.planning.nxdi_rules import NEURON_TARGET_OPTION, target_on
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec, one_of


def builds_ordered() -> Mapping[str, OrderedBuild]:
    """All builds by name, as orders state them. One query."""
    return {row.name: row.ordered() for row in EngineBuild.objects.all()}


def build_digests() -> dict[str, str]:
    """Name -> digest of all builds that nodes fetch. One query."""
    return dict(EngineBuild.objects.exclude(uri__startswith=EXTERNAL).values_list("name", "digest"))


def wrong_build(spec: VersionSpec) -> str:
    """Why a version may not name its build, on any of its instance types; an empty text if it may. One query, none
    without a build."""
    everywhere = (spec, *(spec.on(kind) for kind in spec.by_type))
    named = {each.engine_build for each in everywhere if each.engine_build}
    if not named:
        return ""
    known = {row.name: row for row in EngineBuild.objects.all()}
    return next(filter(None, (_wrong_on(each, known) for each in everywhere if each.engine_build)), "")


def _wrong_on(spec: VersionSpec, known: Mapping[str, EngineBuild]) -> str:
    row = known.get(spec.engine_build)
    if row is None:
        return f"engine_build is {spec.engine_build!r}; {one_of(sorted(known) or ['none yet'], spec.engine_build)}"
    command = spec.engine_options.get("command", "")
    serves = f"{GENERIC_PREFIX}{command}" if spec.engine == "generic" else spec.engine
    if row.serves != serves:
        return f"engine_build is {row.name}, which has engine {row.serves}; the version needs one with {serves}"
    if row.is_external and (other := _other_target(spec, row)):
        return other
    if spec.roles:
        return f"engine_build is {row.name}; builds lack packages of prefill and decode cells; leave it empty"
    return ""


def _other_target(spec: VersionSpec, row: EngineBuild) -> str:
    """Why a version is rendered for another release of Neuron's SDK than the build's; an empty text if it is not."""
    for name, shape in instance_shapes(spec.parallelism).items():
        if shape.vendor != NEURON:
            continue
        try:
            target = target_on(spec, shape)
        except InvalidVersion as error:
            return str(error)
        if target.sdk != row.version:
            option = f"engine_options.{NEURON_TARGET_OPTION}"
            text = f"engine_build is {row.name}, of SDK {row.version}; on {name} the version is for {target.name}"
            return f"{text} of SDK {target.sdk}: name a build of it, or set {option}"
    return ""


def build_uses(name: str) -> list[str]:
    """Versions that name a build and are not retired, as operators name them."""
    return uses_by_build().get(name, [])


def uses_by_build() -> dict[str, list[str]]:
    """Build -> versions that name it and are not retired, as operators name them. One query."""
    uses: dict[str, list[str]] = {}
    rows = ModelVersion.objects.exclude(state=VersionState.RETIRED.value).exclude(engine_build="", by_type={})
    for row in rows.order_by("model_id", "id"):
        on_types = (str(stated.get("engine_build") or "") for stated in row.by_type.values())
        for name in {row.engine_build, *on_types} - {""}:
            uses.setdefault(name, []).append(row.reference)
    return uses


def build_file(hex_digest: str, name: str, sources: Iterable[Place]) -> Path | None:
    """The file of a build that this host hands out; None if it has no such build in its artifact sources, or the build
    has no such file."""
    allowed = tuple(sources)
    for row in EngineBuild.objects.filter(digest=f"{DIGEST_PREFIX}{hex_digest}"):
        if row.is_external:
            continue
        place = parse_place(row.uri)
        if place.scheme != "file" or name not in {MANIFEST_NAME, BUILD_FILE, *part_names(row.facts)}:
            continue
        try:
            path = (Path(place.path) / name).resolve(strict=True)
            check_source(Place("file", "", str(path)), _resolved(allowed))
        except (OSError, BadArtifact):
            continue
        return path
    return None


def _resolved(sources: Iterable[Place]) -> list[Place]:
    return [Place("file", "", str(Path(each.path).resolve())) for each in sources if each.scheme == "file"]
