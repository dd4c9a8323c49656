"""Models and the versions of each, with the deployments that serve them."""

from dataclasses import dataclass

from django.db.models import Q

from controlplane.kernel.tones import Tone
from models_registry.models import ModelVersion, VersionState

VERSIONS_SHOWN = 200

VERSION_TONE: dict[str, Tone] = {
    VersionState.DRAFT: Tone.IDLE,
    VersionState.VALIDATED: Tone.BAKE,
    VersionState.RELEASED: Tone.OK,
    VersionState.RETIRED: Tone.IDLE,
}


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version. `degrees` says what one cell is, by instance type; `deployments` names those that serve it."""

    version: ModelVersion
    tone: Tone
    degrees: tuple[tuple[str, str], ...]
    deployments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VersionList:
    rows: tuple[VersionRow, ...]
    more: bool
    filtered: bool


def version_list(*, text: str = "", limit: int = VERSIONS_SHOWN) -> VersionList:
    """Versions by model, youngest first, in two queries."""
    versions = ModelVersion.objects.select_related("model").prefetch_related("deployments")
    if text:
        versions = versions.filter(
            Q(model__name__icontains=text) | Q(version__icontains=text) | Q(engine__icontains=text)
        )
    found = list(versions[: limit + 1])
    return VersionList(rows=tuple(_row(each) for each in found[:limit]), more=len(found) > limit, filtered=bool(text))


def _row(version: ModelVersion) -> VersionRow:
    return VersionRow(
        version=version,
        tone=VERSION_TONE[version.state],
        degrees=tuple((kind, _degrees(degrees)) for kind, degrees in sorted(version.parallelism.items())),
        deployments=tuple(deployment.name for deployment in version.deployments.all()),
    )


def _degrees(degrees: dict[str, int]) -> str:
    """`{"nodes": 2, "tp": 8}` -> "2 nodes, tp 8"."""
    nodes = degrees.get("nodes", 1)
    parts = [f"{nodes} node" if nodes == 1 else f"{nodes} nodes"]
    parts += [f"{name} {degree}" for name, degree in degrees.items() if name != "nodes" and degree != 1]
    return ", ".join(parts)
