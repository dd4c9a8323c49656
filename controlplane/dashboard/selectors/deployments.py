"""Deployments: what they want, what they have, and whether their users are fine."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from django.db.models import QuerySet

from controlplane.dashboard.selectors.cells import CellRow, cell_row, cells_with_members
from controlplane.dashboard.selectors.load import load_sum
from controlplane.kernel.tones import Tone
from engine_agent.protocol.messages import Load
from fleet.models import Cell, Deployment
from fleet.planning.states import CellState


class Service(StrEnum):
    """How a deployment, or its part in a region, looks to its users."""

    SERVING = "serving"
    DEGRADED = "degraded"
    DOWN = "down"
    OFF = "off"


SERVICE_TONE: dict[Service, Tone] = {
    Service.SERVING: Tone.OK,
    Service.DEGRADED: Tone.WARN,
    Service.DOWN: Tone.BAD,
    Service.OFF: Tone.IDLE,
}


@dataclass(frozen=True, slots=True)
class Share:
    """What a deployment wants in one region, and the live cells it has there."""

    region: str
    wanted: int
    cells: tuple[Cell, ...]

    @property
    def ready(self) -> int:
        return sum(cell.state == CellState.READY for cell in self.cells)

    @property
    def to_come(self) -> range:
        """One for each wanted cell that does not exist yet."""
        return range(max(0, self.wanted - len(self.cells)))

    @property
    def service(self) -> Service:
        return service_of(ready=self.ready, wanted=self.wanted)

    @property
    def tone(self) -> Tone:
        return SERVICE_TONE[self.service]


@dataclass(frozen=True, slots=True)
class DeploymentRow:
    """A deployment by region. `silent` counts ready cells whose load is unknown, so `load` misses them."""

    deployment: Deployment
    shares: tuple[Share, ...]
    load: Load | None
    silent: int

    @property
    def ready(self) -> int:
        return sum(share.ready for share in self.shares)

    @property
    def wanted(self) -> int:
        return sum(share.wanted for share in self.shares)

    @property
    def service(self) -> Service:
        return service_of(ready=self.ready, wanted=self.wanted)

    @property
    def tone(self) -> Tone:
        return SERVICE_TONE[self.service]

    @property
    def errors_percent(self) -> float | None:
        """Failed requests in percent of all since each cell's proxy started, or None without any request."""
        if self.load is None or self.load.requests_total == 0:
            return None
        return 100.0 * self.load.errors_total / self.load.requests_total


@dataclass(frozen=True, slots=True)
class DeploymentList:
    rows: tuple[DeploymentRow, ...]
    filtered: bool


def service_of(*, ready: int, wanted: int) -> Service:
    if wanted == 0:
        return Service.SERVING if ready else Service.OFF
    if ready == 0:
        return Service.DOWN
    return Service.SERVING if ready >= wanted else Service.DEGRADED


def deployment_list(*, now: datetime, text: str = "") -> DeploymentList:
    """Every deployment with its live cells, in four queries."""
    deployments = _deployments()
    if text:
        deployments = deployments.filter(name__icontains=text)
    return DeploymentList(rows=_rows(deployments, now), filtered=bool(text))


def deployment_find(*, name: str, now: datetime) -> DeploymentRow | None:
    """One deployment, or None."""
    return next(iter(_rows(_deployments().filter(name=name), now)), None)


def _deployments() -> "QuerySet[Deployment]":
    return Deployment.objects.select_related("model_version", "instance_type").prefetch_related("regions__region")


def _rows(deployments: "QuerySet[Deployment]", now: datetime) -> tuple[DeploymentRow, ...]:
    cells = cells_with_members().filter(deployment__in=deployments).exclude(state=CellState.STOPPED)
    rows: dict[str, list[CellRow]] = defaultdict(list)
    for cell in cells.order_by("region__position", "region_id", "created_at", "id"):
        rows[cell.deployment_id].append(cell_row(cell, now))
    return tuple(_row(deployment, rows[deployment.name]) for deployment in deployments)


def _row(deployment: Deployment, rows: list[CellRow]) -> DeploymentRow:
    return DeploymentRow(
        deployment=deployment,
        shares=shares_of(deployment, [row.cell for row in rows]),
        load=load_sum(row.load for row in rows if row.load is not None),
        silent=sum(row.cell.state == CellState.READY and row.load is None for row in rows),
    )


def shares_of(deployment: Deployment, cells: Iterable[Cell]) -> tuple[Share, ...]:
    """The deployment by region, `regions__region` loaded. `cells` are its live ones, in the order of their regions."""
    by_region: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_region[cell.region_id].append(cell)
    wishes = sorted(deployment.regions.all(), key=lambda wish: (wish.region.position, wish.region_id))
    wanted = {wish.region_id: wish.cells for wish in wishes}
    # A region that was taken out of the deployment still has cells until they have drained.
    regions = dict.fromkeys((*wanted, *by_region))
    return tuple(
        Share(region=region, wanted=wanted.get(region, 0), cells=tuple(by_region[region])) for region in regions
    )
