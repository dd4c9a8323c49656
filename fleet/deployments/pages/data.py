"""Data of the pages about deployments: target and live cells, load, shares of machines, and instance types with
capacity and cost. Reads only."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from django.db.models import Count, QuerySet

from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.lists import Column, List, ListPage
from engine_agent.protocol.load_messages import Load
from fleet.capacity.planning.rates import MachinePrice
from fleet.capacity.selectors import machine_prices
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import GrantRule, RequestCounts
from fleet.deployments.selectors import concurrency_on
from fleet.load.pages import NO_LOAD, SummedLoad, loads_by_deployment
from fleet.load.selectors import deployment_subject, seen_in_last_hour
from fleet.nodes.selectors import AwaitedMachines, machines_awaited
from fleet.quotas.selectors import QUOTA_STATES, QuotaUse, quota_uses
from fleet.reconcile.planning.states import CellState
from kernel.tones import Tone
from models_registry.versions.planning.engine_arguments import nodes_per_cell
from models_registry.versions.planning.spec import InvalidVersion
from traffic.region_shares.selectors.traffic import traffic_policies

CellCounts = Mapping[tuple[str, str], Mapping[str, int]]


class Service(StrEnum):
    """State of a deployment, in total or in a region, for its users."""

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
class RegionCells:
    """Target and live cells of a deployment in one region. `states`: state -> number of cells."""

    region: str
    wanted: int
    states: Mapping[str, int]

    @property
    def existing(self) -> int:
        return sum(self.states.values())

    @property
    def ready(self) -> int:
        return self.states.get(CellState.READY.value, 0)

    @property
    def service(self) -> Service:
        return service_of(ready=self.ready, wanted=self.wanted)

    @property
    def tone(self) -> Tone:
        return SERVICE_TONE[self.service]


Placed = tuple[Deployment, tuple[RegionCells, ...]]


@dataclass(frozen=True, slots=True)
class DeploymentRow:
    """A deployment by region. `silent`: ready cells without load reports, which `load` therefore misses. `awaited`:
    why machines that it may use do not arrive, only on its own page."""

    deployment: Deployment
    shares: tuple[RegionCells, ...]
    load: Load | None
    silent: int
    last_hour: RequestCounts
    awaited: tuple[AwaitedMachines, ...] = ()

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
        """Failed and rejected requests in percent of all requests of the last hour, or None without requests."""
        return 100.0 * self.last_hour.errors / self.last_hour.requests if self.last_hour.requests else None


def service_of(*, ready: int, wanted: int) -> Service:
    if wanted == 0:
        return Service.SERVING if ready else Service.OFF
    if ready == 0:
        return Service.DOWN
    return Service.SERVING if ready >= wanted else Service.DEGRADED


def deployments_placed() -> tuple[Placed, ...]:
    """Three queries."""
    return _placed(_deployments())


def deployment_list(placed: Sequence[Placed], now: datetime) -> ListPage[DeploymentRow]:
    """Deployments with the summed load of their live cells, as a part of another page. One query."""
    return DEPLOYMENT_LIST.part_of_rows(_deployment_rows(placed, now))


def _listed(request: PageRequest) -> "QuerySet[Deployment]":
    text = request.text("q")
    return _deployments().filter(name__icontains=text) if text else _deployments()


def _load_of(name: str) -> Callable[[DeploymentRow], object]:
    return lambda row: getattr(row.load, name, None)


OF_CELLS = "Median of the cells' medians, last 30 s"
OF_REQUESTS = "Share of all requests since each cell's proxy started"
DEPLOYMENT_LIST: List[DeploymentRow] = List(
    name="deployments",
    columns=(
        Column("deployment", "Deployment", lambda row: row.deployment.pk),
        Column("service", "Service", lambda row: row.service),
        Column("version", "Version", lambda row: row.deployment.model_version.reference, css="wide"),
        Column("class", "Class", lambda row: row.deployment.get_serving_class_display(), css="wide"),
        Column("cells", "Cells", lambda row: row.ready, css="number"),
        Column("in-flight", "In flight", _load_of("in_flight"), css="wide number", is_newest_first=True),
        Column("queued", "Queued", _load_of("queued"), css="wide number", is_newest_first=True),
        Column("tokens", "Tokens/s", _load_of("tokens_per_s"), css="wide number", is_newest_first=True),
        Column("ttft-p50", "TTFT p50", _load_of("ttft_p50_ms"), css="wide number", title=OF_CELLS),
        Column("ttft-p99", "TTFT p99", _load_of("ttft_p99_ms"), css="number", title="Of the worst cell, last 30 s"),
        Column("errors", "Errors", lambda row: row.errors_percent, css="wide number", title=OF_REQUESTS),
    ),
    query=_listed,
    rows=lambda deployments, now: _deployment_rows(_placed(deployments), now),
    order=("name",),
    by_value=True,
)


def deployment_find(*, name: str, now: datetime) -> DeploymentRow | None:
    row = next(iter(_deployment_rows(_placed(_deployments().filter(name=name)), now)), None)
    if row is None:
        return None
    return replace(row, awaited=machines_awaited([one.region for one in row.shares], row.deployment.instance_types))


def _deployments() -> "QuerySet[Deployment]":
    return Deployment.objects.select_related("model_version").prefetch_related("regions__region")


def _placed(deployments: Iterable[Deployment]) -> tuple[Placed, ...]:
    rows = list(deployments)
    counts = _cell_counts([deployment.name for deployment in rows])
    return tuple((deployment, _cells_by_region(deployment, counts)) for deployment in rows)


def _deployment_rows(placed: Sequence[Placed], now: datetime) -> tuple[DeploymentRow, ...]:
    names = [deployment.name for deployment, _ in placed]
    loads, seen = loads_by_deployment(names, now), seen_in_last_hour(map(deployment_subject, names), now)
    return tuple(
        _deployment_row(
            deployment, shares, loads.get(deployment.name, NO_LOAD), seen[deployment_subject(deployment.name)]
        )
        for deployment, shares in placed
    )


def _deployment_row(
    deployment: Deployment, shares: tuple[RegionCells, ...], total: SummedLoad, last_hour: RequestCounts
) -> DeploymentRow:
    silent = sum(share.ready for share in shares) - total.ready_cells
    return DeploymentRow(deployment=deployment, shares=shares, load=total.load, silent=silent, last_hour=last_hour)


def _cell_counts(deployments: Sequence[str]) -> CellCounts:
    """(deployment, region) -> state -> number of live cells, in the order of regions."""
    live = Cell.objects.exclude(state=CellState.STOPPED.value).filter(deployment__in=deployments)
    rows = live.order_by("region__position", "region_id").values_list("deployment_id", "region_id", "state")
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for deployment, region, state, number in rows.annotate(number=Count("pk")):
        counts.setdefault((deployment, region), {})[state] = number
    return counts


def _cells_by_region(deployment: Deployment, counts: CellCounts) -> tuple[RegionCells, ...]:
    """The deployment by region. Needs `regions__region` prefetched."""
    wishes = sorted(deployment.regions.all(), key=lambda wish: (wish.region.position, wish.region_id))
    wanted = {wish.region_id: wish.cells for wish in wishes}
    # A removed region keeps cells until they are drained.
    regions = dict.fromkeys((*wanted, *(region for name, region in counts if name == deployment.name)))
    return tuple(
        RegionCells(region=region, wanted=wanted.get(region, 0), states=counts.get((deployment.name, region), {}))
        for region in regions
    )


@dataclass(frozen=True, slots=True)
class LimitedPlace:
    """A region with a grant below its target, now or recently."""

    place: DeploymentRegion

    @property
    def tone(self) -> Tone:
        is_limited = self.place.cells_in_force < self.place.cells
        return Tone.WARN if is_limited and self.place.grant_rule != GrantRule.RETURN else Tone.MOVING


@dataclass(frozen=True, slots=True)
class Shares:
    """A deployment's priority, team and grants."""

    deployment: str
    team: str
    priority: int
    is_class_priority: bool
    preemptible: bool
    preempts: str
    places: tuple[LimitedPlace, ...]


def shares_of(deployment: Deployment) -> Shares:
    policy = deployment.sharing()
    limited = DeploymentRegion.objects.filter(deployment=deployment, cells_granted__isnull=False)
    return Shares(
        deployment=deployment.name,
        team=deployment.team,
        priority=policy.priority or 0,
        is_class_priority=deployment.priority is None,
        preemptible=bool(policy.preemptible),
        preempts=policy.preempts.value,
        places=tuple(LimitedPlace(place) for place in limited.order_by("region_id")),
    )


ENTITLED, BORROWED = "Machines that the team is entitled to", "Beyond its quota"
UNUSED = "Unused part of the quota, which other teams may borrow"


def _quota_number(
    name: str, label: str, value: Callable[[QuotaUse], int], title: str, css: str = ""
) -> Column[QuotaUse]:
    return Column(name, label, value, css=f"{css} number".strip(), title=title, is_newest_first=True)


QUOTA_LIST: List[QuotaUse] = List(
    name="quotas",
    prefix="quotas-",
    columns=(
        Column("team", "Team", lambda row: row.quota.team),
        Column("type", "Type", lambda row: row.quota.instance_type_id),
        Column("region", "Region", lambda row: row.quota.region_id or "all"),
        _quota_number("entitled", "Entitled", lambda row: row.quota.machines, ENTITLED),
        _quota_number("used", "Used", lambda row: row.used, "Machines in cells of its deployments"),
        _quota_number("borrowed", "Borrowed", lambda row: row.borrowed, BORROWED),
        _quota_number("idle", "Idle", lambda row: row.idle, UNUSED),
        _quota_number("wanted", "Wanted", lambda row: row.wanted, "Machines that all its wanted cells need", "wide"),
        Column("deployments", "Deployments", lambda row: ", ".join(row.deployments), css="wide"),
        Column("state", "State", lambda row: row.state, choices=QUOTA_STATES),
    ),
    query=lambda request: quota_uses(),
    find=("team", "type", "region", "deployments"),
    by_value=True,
)


@dataclass(frozen=True, slots=True)
class TypeRow:
    """A deployment's cells on an instance type in a region. `stated`: target set by a user, if any; `capacity`: tested
    concurrent requests per cell; `machines`: per cell; `price`: per machine."""

    region: str
    instance_type: str
    cells: int
    ready: int
    stated: int | None
    capacity: int
    machines: int
    price: MachinePrice

    @property
    def per_hour(self) -> float | None:
        """US dollars per hour and cell, or None if unknown."""
        return None if self.price.usd is None else self.price.usd * self.machines

    @property
    def per_request(self) -> float | None:
        """US dollars per hour and concurrent request, or None if unknown."""
        return None if self.per_hour is None else self.per_hour / self.capacity


@dataclass(frozen=True, slots=True)
class DeploymentTypes:
    """`is_choice`: it lists several types; `problem`: why its version is unreadable, or ""."""

    rows: tuple[TypeRow, ...]
    is_choice: bool
    problem: str = ""


def deployment_types(deployment: Deployment, now: datetime) -> DeploymentTypes:
    """By region and type, in six queries."""
    is_choice = len(deployment.instance_types) > 1
    try:
        return DeploymentTypes(_type_rows(deployment, now), is_choice)
    except InvalidVersion as wrong:
        return DeploymentTypes((), is_choice, str(wrong))


def _type_rows(deployment: Deployment, now: datetime) -> tuple[TypeRow, ...]:
    live = Cell.objects.filter(deployment=deployment).exclude(state=CellState.STOPPED.value)
    counted = Counter(live.values_list("region_id", "instance_type_id", "state"))
    prices, policy = machine_prices(), traffic_policies().get(deployment.pk)
    version = deployment.model_version
    return tuple(
        TypeRow(
            region=place.region_id,
            instance_type=kind,
            cells=sum(count for (region, on, _), count in counted.items() if (region, on) == (place.region_id, kind)),
            ready=counted[place.region_id, kind, CellState.READY.value],
            stated=place.by_type.get(kind),
            capacity=(policy and policy.tested_on(kind)) or concurrency_on(version, kind),
            machines=nodes_per_cell(version.spec(), kind),
            price=prices.of(place.region_id, kind, now),
        )
        for place in deployment.regions.all()
        for kind in deployment.instance_types
    )
