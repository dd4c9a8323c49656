"""Loads what a plan of the day is made from: deployments with their cells, what is expected of them, batches that are
due, and the machines that there are and may be had. In a constant number of queries."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from fleet.models import Cell, Deployment, DeploymentRegion
from fleet.planning.autoscaling.needs import BELOW_CAP
from fleet.planning.autoscaling.policy import InvalidScaling
from fleet.planning.capacity.view import (
    BatchWork,
    CapacityView,
    CellKind,
    Demand,
    PlannedDeployment,
    PlannedPlace,
    within_budget,
)
from fleet.planning.forecast.series import SLOT_S, SLOTS
from fleet.planning.states import CellState
from fleet.selectors.machine_pools import machine_pools
from fleet.selectors.model_version import concurrency_on
from fleet.selectors.rate import machine_prices
from fleet.selectors.start_up import CREATED, start_times_s, typical_s
from models_registry.planning.engine_arguments import nodes_per_cell
from models_registry.planning.version_spec import InvalidVersion
from traffic.models import Batch, DemandForecast, TrafficMatrix
from traffic.models.batch import OPEN_STATES
from traffic.planning.traffic_policy import TrafficPolicy
from traffic.selectors.batch import tallies
from traffic.selectors.batch_budget import line_times, served_names
from traffic.selectors.demand import FORECAST_FRESH_FOR
from traffic.selectors.steering import traffic_policies

BATCH = "batch"
COLD_S = 60.0
"""A cell without cached prefixes works about so long more for the same: what a start costs beside its machines. An
assumption, until somebody measures it."""
THERE = (CellState.PENDING.value, CellState.STARTING.value, CellState.READY.value)
Place = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of all places. `cells`: of a deployment in a region on a type; `start_s`: seconds
    that starts of a deployment took."""

    at: datetime
    now: datetime
    demands: Mapping[Place, Demand]
    works: Mapping[Place, tuple[BatchWork, ...]]
    cells: Mapping[tuple[str, str, str], int]
    policies: Mapping[str, TrafficPolicy]
    start_s: Mapping[str, list[float]]


def capacity_view(now: datetime) -> CapacityView | None:
    """None: nobody forecasts anything lately, so there is nothing to plan by."""
    series = DemandForecast.objects.filter(made_at__gt=now - FORECAST_FRESH_FOR, is_judged=True)
    rows = list(series.exclude(serving_class=BATCH).defer("ledger", "p99", "methods"))
    if not rows:
        return None
    at = max(row.made_at for row in rows)
    deployments = list(Deployment.objects.select_related("model_version").prefetch_related("regions"))
    cells = Counter(Cell.objects.filter(state__in=THERE).values_list("deployment_id", "region_id", "instance_type_id"))
    known = _Known(
        at,
        now,
        _demands(rows, at),
        _works(deployments, now),
        cells,
        traffic_policies(),
        start_times_s([one.name for one in deployments], since=CREATED),
    )
    prices = machine_prices()
    planned = []
    for one in deployments:
        found = _planned(one, known, lambda region, kind: prices.of(region, kind, now).usd or 0.0)
        planned += [found] if found else []
    groups = {(place.region, kind.instance_type) for one in planned for place in one.places for kind in one.kinds}
    return CapacityView(at, tuple(planned), machine_pools(groups, now))


def _planned(one: Deployment, known: _Known, price: Callable[[str, str], float]) -> PlannedDeployment | None:
    """None: it is nowhere, or what is stored of it makes no sense; the page of the deployment says so."""
    policy, version = known.policies.get(one.name, TrafficPolicy()), one.model_version
    try:
        spec, scaling = version.spec(), one.scaling_policy()
        nodes = {kind: nodes_per_cell(spec, kind) for kind in one.instance_types}
        ready_timeout_s = max(spec.on(kind).ready_timeout_s for kind in one.instance_types)
    except (InvalidScaling, InvalidVersion):
        return None
    rows = list(one.regions.all())
    if not rows:
        return None
    prices = {
        row.region_id: {kind: count * price(row.region_id, kind) for kind, count in nodes.items()} for row in rows
    }
    dearest = {region: max(there.values()) for region, there in prices.items()}
    places = within_budget(tuple(_place(row, known) for row in rows), dearest, scaling.budget_per_hour)
    return PlannedDeployment(
        one.name,
        start_up_s=scaling.start_up_s or typical_s(known.start_s.get(one.name), ready_timeout_s),
        kinds=tuple(
            CellKind(
                kind,
                float(policy.tested_on(kind) or concurrency_on(version, kind)),
                count,
                lost_cache=max(there[kind] for there in prices.values()) * COLD_S / 3600.0,
            )
            for kind, count in nodes.items()
        ),
        places=places,
        target=min(scaling.target_utilisation, BELOW_CAP * policy.utilisation_cap),
        priority=one.sharing().priority or 0,
    )


def _place(row: DeploymentRegion, known: _Known) -> PlannedPlace:
    """Where a person sets the number, that is what the plan has there."""
    place = (row.deployment_id, row.region_id)
    cells = row.range
    return PlannedPlace(
        row.region_id,
        least=cells.min if cells else row.cells,
        most=cells.max if cells else row.cells,
        cells={kind: known.cells.get((*place, kind), 0) for kind in row.deployment.instance_types},
        demand=known.demands.get(place),
        batch=known.works.get(place, ()),
    )


def _demands(rows: Iterable[DemandForecast], at: datetime) -> dict[Place, Demand]:
    """What all series of a deployment bring to each region, shared among regions as its requests are now. An older
    forecast ends sooner; its last slot stands for what is after that."""
    names = {row.deployment_id for row in rows}
    shares = dict(TrafficMatrix.objects.filter(deployment__in=names).values_list("deployment_id", "shares"))
    p50: dict[Place, list[float]] = defaultdict(lambda: [0.0] * SLOTS)
    p90: dict[Place, list[float]] = defaultdict(lambda: [0.0] * SLOTS)
    for row in rows:
        passed = round((at - row.made_at).total_seconds() / SLOT_S)
        for region, share in shares.get(row.deployment_id, {}).get(row.origin_id, {row.origin_id: 1.0}).items():
            place = (row.deployment_id, region)
            for sums, values in ((p50[place], row.p50), (p90[place], row.p90)):
                for slot in range(SLOTS):
                    sums[slot] += share * values[min(slot + passed, len(values) - 1)]
    return {place: Demand(tuple(sums), tuple(p90[place])) for place, sums in p50.items()}


def _works(deployments: Iterable[Deployment], now: datetime) -> dict[Place, tuple[BatchWork, ...]]:
    """Lines of open batches that wait, as requests at once times seconds: a line takes about as long as requests of its
    deployment took while none had to wait. Where nobody knows how long that is, nothing can be planned for them."""
    batches = list(Batch.objects.filter(state__in=OPEN_STATES, expires_at__gt=now))
    if not batches:
        return {}
    served, line_s = served_names(deployments), line_times(one.name for one in deployments)
    done, found = tallies(batches), defaultdict(list)
    for batch in batches:
        place = (served.get(batch.model, ""), batch.region_id)
        left = batch.lines - done[batch.id].completed - done[batch.id].failed
        if place in line_s and left > 0:
            within_s, is_late = (batch.expires_at - now).total_seconds(), batch.cells_asked_at is not None
            work = BatchWork(left * line_s[place], within_s, is_late)
            found[place].append(work)
    return {place: tuple(works) for place, works in found.items()}
