"""Models and the versions of each, with what serves them."""

from dataclasses import dataclass

from django.db.models import Count, Q, QuerySet

from fleet.planning.states import CellState
from models_registry.models import Model, ModelVersion

VERSIONS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version. `degrees` says what one cell is, by instance type; `deployments` names those that serve it, `cells`
    counts its live cells."""

    version: ModelVersion
    degrees: tuple[tuple[str, str], ...]
    deployments: tuple[str, ...]
    cells: int


@dataclass(frozen=True, slots=True)
class VersionList:
    rows: tuple[VersionRow, ...]
    more: bool
    filtered: bool


@dataclass(frozen=True, slots=True)
class ModelPage:
    """A model with its versions, youngest first. `serving`: the deployments of any of them."""

    model: Model
    versions: VersionList

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(sorted({name for row in self.versions.rows for name in row.deployments}))

    @property
    def released(self) -> str:
        """The youngest released version, "" if none is."""
        return next((row.version.version for row in self.versions.rows if row.version.state == "released"), "")


def version_list(*, text: str = "", limit: int = VERSIONS_SHOWN) -> VersionList:
    """Versions by model, youngest first, in two queries."""
    versions = _versions()
    if text:
        versions = versions.filter(
            Q(model__name__icontains=text) | Q(version__icontains=text) | Q(engine__icontains=text)
        )
    return _list(versions, bool(text), limit)


def model_find(name: str) -> ModelPage | None:
    """One model with its versions, in three queries; None if there is none of this name."""
    model = Model.objects.filter(name=name).first()
    return ModelPage(model, _list(_versions().filter(model=model), False, VERSIONS_SHOWN)) if model else None


def _versions() -> "QuerySet[ModelVersion]":
    live = Count("cells", filter=~Q(cells__state=CellState.STOPPED.value))
    versions = ModelVersion.objects.select_related("model").prefetch_related("deployments")
    return versions.annotate(live_cells=live).order_by("model_id", "-id")


def _list(versions: "QuerySet[ModelVersion]", filtered: bool, limit: int) -> VersionList:
    found = list(versions[: limit + 1])
    return VersionList(rows=tuple(_row(each) for each in found[:limit]), more=len(found) > limit, filtered=filtered)


def _row(version: ModelVersion) -> VersionRow:
    return VersionRow(
        version=version,
        degrees=tuple((kind, degrees_words(degrees)) for kind, degrees in sorted(version.parallelism.items())),
        deployments=tuple(deployment.name for deployment in version.deployments.all()),
        cells=getattr(version, "live_cells", 0),
    )


def degrees_words(degrees: dict[str, int]) -> str:
    """`{"nodes": 2, "tp": 8}` -> "2 nodes, tp 8"."""
    nodes = degrees.get("nodes", 1)
    parts = [f"{nodes} node" if nodes == 1 else f"{nodes} nodes"]
    parts += [f"{name} {degree}" for name, degree in degrees.items() if name != "nodes" and degree != 1]
    return ", ".join(parts)
