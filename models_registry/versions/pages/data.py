"""Reads models and versions for their pages: the list, a model, and a version with its configuration, cells,
validation, use, measurements and differences. Decides and writes nothing."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from django.db import connection
from django.db.models import Count, Q, QuerySet

from controlplane.dashboard.fragments import PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.load.planner import FINE_S
from fleet.reconcile.planning.states import CELL_TONE, CellState
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE, rollouts_described
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import Model, ModelVersion, Validation
from models_registry.versions.planning.diff import (
    NOT_NAMED,
    Change,
    InstanceTypeDiff,
    Line,
    VersionDiff,
    diff_versions,
    diff_without_values,
    stated_fields,
    without_values,
)
from models_registry.versions.planning.lifecycle import VersionState
from models_registry.versions.selectors import (
    checkpoints_of,
    latest_validation,
    renderings,
    version_by_reference,
    version_uses,
    versions_described,
)

SIBLINGS_OFFERED = 100
MEASURED_FOR = timedelta(hours=1)
CELLS_MEASURED = 50
"""Cells of a version that are read, longest ready first: an hour of each is 240 windows."""

_MEASURED = """
SELECT cell.deployment_id, cell.region_id, cell.instance_type_id, count(DISTINCT cell.id),
    sum(requests)::bigint, sum(errors)::bigint, max(tokens_per_s), max(in_flight), max(ttft_p50_ms), max(ttft_p95_ms),
    max(itl_p95_ms)
FROM (
    SELECT id, deployment_id, region_id, instance_type_id, state_since FROM fleet_cell
    WHERE model_version_id = %(version)s AND state = 'ready' ORDER BY state_since, id LIMIT %(most)s
) cell
JOIN fleet_loadsubject subject ON subject.name = 'cell:' || cell.id
JOIN fleet_loadwindow load ON load.subject_id = subject.id AND load.step_s = %(step)s
    AND load.at >= greatest(%(since)s, cell.state_since)
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version. `degrees`: the shape of a cell by instance type. `deployments`: those that serve it. `cells`: number
    of live cells."""

    version: ModelVersion
    degrees: tuple[tuple[str, str], ...]
    deployments: tuple[str, ...]
    cells: int


@dataclass(frozen=True, slots=True)
class ModelPage:
    """`serving`: deployments of any of its versions, of which `released` is the newest that is released, or ""."""

    model: Model
    serving: tuple[str, ...]
    versions: int
    released: str


@dataclass(frozen=True, slots=True)
class CellOfVersion:
    """A cell on one instance type: `degrees` as text, `arguments` one line per flag."""

    instance_type: str
    problem: str
    engine: str
    artifact_uri: str
    artifact_digest: str
    max_concurrency: int
    degrees: str
    arguments: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VersionPage:
    version: ModelVersion
    options: tuple[tuple[str, Any], ...]
    validation: Validation | None
    uses: tuple[str, ...]
    siblings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegionCells:
    """A deployment's cells of the version in a region: number in each state, with its tone."""

    deployment: str
    region: str
    cells: int
    states: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class VersionRuns:
    """`deployments` that want it, its `cells` by deployment and region, and active `rollouts` to or from it."""

    version: ModelVersion
    deployments: tuple[Deployment, ...]
    rollouts: tuple[Rollout, ...]
    cells: tuple[RegionCells, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a comparison: different ones and equal ones."""

    differing: tuple[Line, ...]
    alike: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class DiffPage:
    """`diff` None: no version to compare with. `siblings`: other versions of the model."""

    version: ModelVersion
    against: str
    diff: VersionDiff | None
    siblings: tuple[str, ...]

    @property
    def side_labels(self) -> tuple[str, str]:
        """Short names of the two versions, without the model if it is the same."""
        sides = (self.against, self.version.reference)
        models = {side.partition("@")[0] for side in sides}
        return (sides[0].partition("@")[2], sides[1].partition("@")[2]) if len(models) == 1 else sides

    def options(self) -> Lines:
        """Engine, artifacts and prompts of both."""
        return _lines(self.diff.fields) if self.diff else _lines(())

    def instance_types(self) -> tuple["InstanceTypeLines", ...]:
        """Instance types with the degrees of a cell, and with engine arguments if both sides have some."""
        return tuple(_instance_type_lines(kind, self) for kind in self.diff.instance_types) if self.diff else ()


@dataclass(frozen=True, slots=True)
class InstanceTypeLines:
    """`impossible`: versions without a possible cell, with the reason, and whether they name the instance type."""

    instance_type: str
    impossible: tuple[tuple[str, str, bool], ...]
    lines: Lines


@dataclass(frozen=True, slots=True)
class MeasuredCells:
    """Cells of one deployment and region. Peaks are of one cell within 15 s; latencies are those of the worst cell and
    window."""

    deployment: str
    region: str
    instance_type: str
    cells: int
    requests: int
    errors: int
    peak_tokens_per_s: float
    peak_in_flight: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p95_ms: float | None


def _listed(request: PageRequest) -> "QuerySet[ModelVersion]":
    versions, text = _versions(), request.text("q")
    words = Q(model__name__icontains=text) | Q(version__icontains=text) | Q(engine__icontains=text)
    return versions.filter(words) if text else versions


def _degrees(row: VersionRow) -> str:
    return "; ".join(f"{degrees} of {kind}" for kind, degrees in row.degrees)


VERSION_LIST: List[VersionRow] = List(
    name="model-versions",
    columns=(
        Column("version", "Version", lambda row: row.version.reference, ("model_id", "version")),
        Column("state", "State", lambda row: row.version.state, ("state",)),
        Column("engine", "Engine", lambda row: row.version.engine, ("engine",)),
        Column("cell", "One cell", _degrees, css="wide"),
        Column("context", "Context", lambda row: row.version.context_length, ("context_length",), "wide number"),
        Column("most", "Concurrency", lambda row: row.version.max_concurrency, ("max_concurrency",), "wide number"),
        Column("artifact", "Artifact", lambda row: row.version.artifact_digest, ("artifact_digest",), "wide"),
        Column("serves", "Serves", lambda row: " ".join(row.deployments), css="wide"),
        Column("cells", "Cells", lambda row: row.cells, ("live_cells",), "number", is_newest_first=True),
        Column("created", "Created", lambda row: row.version.created_at, ("id",), "wide number", is_newest_first=True),
    ),
    query=_listed,
    rows=lambda versions, now: [_version_row(each) for each in versions],
    order=("model_id", "-id"),
)


def model_find(name: str) -> ModelPage | None:
    model = Model.objects.filter(name=name).first()
    if model is None:
        return None
    serving = Deployment.objects.filter(model_version__model=model).order_by("name").values_list("name", flat=True)
    states = list(model.versions.order_by("-id").values_list("version", "state"))
    released = next((version for version, state in states if state == VersionState.RELEASED), "")
    return ModelPage(model, tuple(serving), len(states), released)


MODEL_VERSION_LIST: List[VersionRow] = replace(
    VERSION_LIST,
    name="versions",
    prefix="versions-",
    query=lambda request: _versions().filter(model=request.key),
    order=("-id",),
    find=("version", "engine"),
)


def _versions() -> "QuerySet[ModelVersion]":
    live = Count("cells", filter=~Q(cells__state=CellState.STOPPED.value))
    versions = ModelVersion.objects.select_related("model").prefetch_related("deployments")
    return versions.annotate(live_cells=live)


def _version_row(version: ModelVersion) -> VersionRow:
    return VersionRow(
        version=version,
        degrees=tuple((kind, degrees_text(degrees)) for kind, degrees in sorted(version.parallelism.items())),
        deployments=tuple(deployment.name for deployment in version.deployments.all()),
        cells=getattr(version, "live_cells", 0),
    )


def degrees_text(degrees: dict[str, int]) -> str:
    """`{"nodes": 2, "tp": 8}` -> "2 nodes, tp 8"."""
    nodes = degrees.get("nodes", 1)
    parts = [f"{nodes} node" if nodes == 1 else f"{nodes} nodes"]
    parts += [f"{name} {degree}" for name, degree in degrees.items() if name != "nodes" and degree != 1]
    return ", ".join(parts)


def _instance_type_lines(kind: InstanceTypeDiff, page: DiffPage) -> InstanceTypeLines:
    problems = ((page.against, kind.problem_before), (page.version.reference, kind.problem_after))
    impossible = tuple((reference, problem, problem != NOT_NAMED) for reference, problem in problems if problem)
    lines = kind.degrees if impossible else (*kind.degrees, *kind.arguments)
    return InstanceTypeLines(kind.instance_type, impossible, _lines(lines))


def _lines(lines: tuple[Line, ...]) -> Lines:
    differing = tuple(line for line in lines if line.change is not Change.SAME)
    return Lines(differing, tuple(line for line in lines if line.change is Change.SAME))


def version_find(reference: str) -> ModelVersion | None:
    """The version `model@version` with its last validation, or None."""
    return version_by_reference(versions_described().select_related("model"), reference)


def version_page(version: ModelVersion, *, values: bool) -> VersionPage:
    """With or without the values of the engine's variables."""
    said = {name: value for name, value in stated_fields(version.spec()).items() if _is_option(name)}
    shown = {name: value if values else without_values(name, value) for name, value in said.items()}
    return VersionPage(
        version=version,
        options=tuple(sorted(shown.items())),
        validation=latest_validation(version),
        uses=tuple(version_uses(version.pk)),
        siblings=_siblings(version),
    )


def _is_option(name: str) -> bool:
    """Golden prompts have a separate fragment."""
    return not name.startswith("golden_")


def version_cells(version: ModelVersion) -> tuple[CellOfVersion, ...]:
    return tuple(
        CellOfVersion(
            instance_type=each.instance_type,
            problem=each.problem,
            engine=each.engine,
            artifact_uri=each.artifact_uri,
            artifact_digest=each.artifact_digest,
            max_concurrency=each.max_concurrency,
            degrees=degrees_text(asdict(each.degrees)) if each.degrees else "",
            arguments=argument_lines(each.arguments),
            notes=each.notes,
        )
        for each in renderings(version, instance_shapes(), checkpoints_of(version.spec()))
    )


def argument_lines(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """`("--a", "1", "--b")` -> `("--a 1", "--b")`."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(argument)
        else:
            lines[-1] += f" {argument}"
    return tuple(lines)


def version_runs(version: ModelVersion) -> VersionRuns:
    """Where it runs, and where a rollout will run it, in three queries."""
    either = Q(from_version=version) | Q(to_version=version)
    live = Cell.objects.filter(model_version=version).exclude(state=CellState.STOPPED.value)
    counted: dict[tuple[str, str], Counter[str]] = {}
    for deployment, region, state in live.values_list("deployment_id", "region_id", "state"):
        counted.setdefault((deployment, region), Counter())[state] += 1
    return VersionRuns(
        version=version,
        deployments=tuple(Deployment.objects.filter(model_version=version)),
        rollouts=tuple(rollouts_described().filter(either, state__in=ACTIVE)),
        cells=tuple(_region_cells(*place, states) for place, states in sorted(counted.items())),
    )


def _region_cells(deployment: str, region: str, states: Counter[str]) -> RegionCells:
    counts = tuple((state, CELL_TONE[CellState(state)].value, number) for state, number in sorted(states.items()))
    return RegionCells(deployment, region, states.total(), counts)


def version_diff(version: ModelVersion, against: str, *, values: bool) -> DiffPage:
    """Differences from the version `against`, also of another model. With or without the values of the engine's
    variables."""
    other = version_by_reference(ModelVersion.objects.all(), against) if against else None
    diff = diff_versions(other.spec(), version.spec(), instance_shapes()) if other else None
    shown = diff_without_values(diff) if diff is not None and not values else diff
    return DiffPage(version, against, shown, _siblings(version))


def _siblings(version: ModelVersion) -> tuple[str, ...]:
    others = ModelVersion.objects.filter(model=version.model_id).exclude(pk=version.pk).order_by("-id")
    return tuple(each.reference for each in others.only("model_id", "version")[:SIBLINGS_OFFERED])


def version_measures(version: ModelVersion, now: datetime) -> tuple[MeasuredCells, ...]:
    """Measurements of its cells in the last hour, from the time each became ready, in one query."""
    values: dict[str, Any] = {
        "version": version.pk,
        "since": now - MEASURED_FOR,
        "step": FINE_S,
        "most": CELLS_MEASURED,
    }
    with connection.cursor() as cursor:
        cursor.execute(_MEASURED, values)
        return tuple(MeasuredCells(*row) for row in cursor.fetchall())


def _measured(request: PageRequest) -> tuple[MeasuredCells, ...]:
    version = found_or_404(version_find(request.key), f"model version {request.key!r}")
    return version_measures(version, request.now)


WORST, PEAK = "Worst 15 s of any cell", "Maximum of one cell over 15 s"


def _measure(path: str, label: str, title: str = "", css: str = "number") -> Column[MeasuredCells]:
    return Column(path.replace("_", "-"), label, attrgetter(path), css=css, title=title, is_newest_first=True)


MEASURED_LIST: List[MeasuredCells] = List(
    name="measured",
    prefix="measured-",
    columns=(
        Column("deployment", "Deployment", lambda row: row.deployment),
        Column("region", "Region", lambda row: row.region),
        Column("type", "Instance type", lambda row: row.instance_type, css="wide"),
        _measure("cells", "Cells", css="wide number"),
        _measure("requests", "Requests", css="wide number"),
        _measure("errors", "Errors", css="wide number"),
        _measure("peak_tokens_per_s", "Tokens/s, peak", PEAK),
        _measure("peak_in_flight", "In flight, peak", PEAK, "wide number"),
        _measure("ttft_p50_ms", "TTFT p50", WORST, "wide number"),
        _measure("ttft_p95_ms", "TTFT p95", WORST),
        _measure("itl_p95_ms", "ITL p95", WORST, "wide number"),
    ),
    query=_measured,
    find=("deployment", "region", "type"),
    by_value=True,
)
