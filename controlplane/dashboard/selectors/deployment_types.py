"""The instance types of a deployment: how many of its cells are on which, what each carries and costs."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from fleet.models import Cell, Deployment
from fleet.planning.rate import MachinePrice
from fleet.planning.states import CellState
from fleet.selectors.model_version import concurrency_on
from fleet.selectors.rate import machine_prices
from models_registry.planning.engine_arguments import nodes_per_cell
from models_registry.planning.version_spec import InvalidVersion
from traffic.selectors.steering import traffic_policies


@dataclass(frozen=True, slots=True)
class TypeRow:
    """A deployment's cells on an instance type in a region. `stated`: how many a person wants there; None: whatever is
    best. `capacity`: requests at once that one was tested for; `machines` that it takes; `price` of one of these."""

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
        """US dollars an hour of a cell; None: unknown."""
        return None if self.price.usd is None else self.price.usd * self.machines

    @property
    def per_request(self) -> float | None:
        """US dollars an hour for a request at once; None: unknown."""
        return None if self.per_hour is None else self.per_hour / self.capacity


@dataclass(frozen=True, slots=True)
class DeploymentTypes:
    """`is_choice`: its cells may be on one type or another; `problem`: why its version cannot be read."""

    rows: tuple[TypeRow, ...]
    is_choice: bool
    problem: str = ""


def deployment_types(deployment: Deployment, now: datetime) -> DeploymentTypes:
    """By region and type, in six queries."""
    is_choice = len(deployment.instance_types) > 1
    try:
        return DeploymentTypes(_rows(deployment, now), is_choice)
    except InvalidVersion as wrong:
        return DeploymentTypes((), is_choice, str(wrong))


def _rows(deployment: Deployment, now: datetime) -> tuple[TypeRow, ...]:
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
