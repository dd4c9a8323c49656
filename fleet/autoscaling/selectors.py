"""Reads what the autoscaler needs: places with a range, their ready cells, prices, how well users are served, start-up
times from events, and the newest day plan. Uses a constant number of queries. Never writes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median

from django.db.models import Prefetch

from fleet.autoscaling.models import MetricReading, ScalingState, ScalingSwitch
from fleet.autoscaling.planning.needs import OBJECTIVE_SEEN_S, MetricValue, NeedSample
from fleet.autoscaling.planning.policy import CloudMetric, InvalidScaling, ScalingMode, ScalingPolicy
from fleet.capacity.models import DayPlan, DayPlanPlace
from fleet.capacity.planning.rates import MachinePrices
from fleet.capacity.planning.view import FRESH_S, PlacePlan
from fleet.capacity.selectors import machine_prices
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import RequestCounts, late_burn, total
from fleet.load.models import LoadWindow
from fleet.load.planner import FINE_S
from fleet.load.selectors import deployment_subject
from fleet.machines.planner import CLOUDS
from fleet.reconcile.planning.snapshot import PlannedPlaceCells
from fleet.reconcile.planning.states import CellState
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from kernel.models import Event
from models_registry.versions.planning.engine_arguments import nodes_per_cell
from models_registry.versions.planning.spec import InvalidVersion

METRIC_PERIODS, METRIC_LATE_S = 2, 300.0
"""A value is recent for so many periods after its end, and for as long as CloudWatch is usually late."""
EVENTS_READ = 2000
SHARE_OF_TIMEOUT = 0.25
"""Used without measured starts: a ready timeout is usually several times a start."""
CREATED, STARTING, READY = "cell.pending", "cell.starting", "cell.ready"


def start_times_s(deployments: Iterable[str] | None = None, *, since: str = STARTING) -> dict[str, list[float]]:
    """Deployment -> seconds of its recent starts, newest first, from events of the kind `since` until the cell was
    ready. A retried start counts from its last try. Without `deployments`, all of them. One query."""
    events = Event.objects.filter(kind__in=[since, READY])
    if deployments is not None:
        events = events.filter(deployment__in=list(deployments))
    ready: dict[str, datetime] = {}
    durations: dict[str, list[float]] = {}
    newest = events.order_by("-id").values_list("kind", "cell", "deployment", "at")
    for kind, cell, deployment, at in newest[:EVENTS_READ]:
        if kind == READY:
            ready[cell] = at
        elif (end := ready.pop(cell, None)) is not None:
            durations.setdefault(deployment, []).append((end - at).total_seconds())
    return durations


def typical_s(measured: Iterable[float] | None, ready_timeout_s: float) -> float:
    """The median of the measured starts, or else a part of the ready timeout."""
    return median(measured) if measured else ready_timeout_s * SHARE_OF_TIMEOUT


Place = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class ServedObjective:
    """How well users of a place were served over `OBJECTIVE_SEEN_S`. None without requests."""

    late_burn: float | None = None
    itl_p95_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RangedDeployment:
    """A deployment with a range. `places`: those with a range, with their latest checks; `cell_prices`: US dollars per
    hour and cell by region, 0 if unknown; `type_prices`: the same by region and type, if known; `elsewhere_price`: cost
    per hour of its cells in other regions."""

    deployment: Deployment
    policy: ScalingPolicy
    places: tuple[DeploymentRegion, ...]
    start_up_s: float
    cell_prices: Mapping[str, float]
    type_prices: Mapping[str, Mapping[str, float]]
    elsewhere_price: float
    is_rolling: bool


@dataclass(frozen=True, slots=True)
class RangedFleet:
    """`ready`: place -> when each ready cell became ready; `types`: live cells per instance type; `waiting`: further
    cells that wait for machines, per type; `problems`: deployment -> why its stored data are invalid; it is left
    unchanged."""

    deployments: tuple[RangedDeployment, ...] = ()
    ready: Mapping[Place, list[datetime]] = field(default_factory=dict)
    types: Mapping[Place, Counter[str]] = field(default_factory=dict)
    waiting: Mapping[Place, Counter[str]] = field(default_factory=dict)
    served: Mapping[Place, ServedObjective] = field(default_factory=dict)
    metrics: Mapping[Place, tuple[MetricValue, ...]] = field(default_factory=dict)
    is_paused: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)


def scaling_switch() -> ScalingSwitch:
    """The fleet's switch. Not paused if it was never used."""
    return ScalingSwitch.objects.first() or ScalingSwitch(paused=False, actor="")


def has_ranges() -> bool:
    return DeploymentRegion.objects.filter(cells_max__isnull=False).exists()


def ranged_fleet(now: datetime, deployment: str = "") -> RangedFleet:
    ranged = DeploymentRegion.objects.filter(cells_max__isnull=False)
    if deployment:
        ranged = ranged.filter(deployment=deployment)
    names = set(ranged.values_list("deployment_id", flat=True))
    if not names:
        return RangedFleet()
    started = start_times_s(names, since=CREATED)
    rolling = set(
        Rollout.objects.filter(deployment__in=names, state__in=ACTIVE).values_list("deployment_id", flat=True)
    )
    rows = Deployment.objects.filter(name__in=names).select_related("model_version")
    found, problems, prices = [], {}, machine_prices()
    ready, types, waiting = _cells_there(names)
    for row in rows.prefetch_related(
        Prefetch("regions", DeploymentRegion.objects.select_related("scaling_state", "role_state"))
    ):
        try:
            price = partial(_cell_price, row, prices, now)
            found.append(_ranged(row, started.get(row.name), row.name in rolling, price, types))
        except (InvalidScaling, InvalidVersion) as wrong:
            problems[row.name] = str(wrong)
    served, is_paused = _served(found, now), scaling_switch().paused
    metrics = metric_values(found, now)
    return RangedFleet(tuple(found), ready, types, waiting, served, metrics, is_paused, problems)


def metric_values(ranged: Iterable[RangedDeployment], now: datetime) -> dict[Place, tuple[MetricValue, ...]]:
    """The recent values of the metrics of CloudWatch that policies name, by place in AWS. No query if they name
    none."""
    named = [one for one in ranged if one.policy.metrics]
    clouds = set(Region.objects.filter(provider__in=CLOUDS).values_list("pk", flat=True)) if named else set()
    wanted = {
        place.pk: (place, [metric for metric in one.policy.metrics if metric.region in ("", place.region_id)])
        for one in named
        for place in one.places
        if place.region_id in clouds
    }
    rows = MetricReading.objects.filter(place__in=wanted) if wanted else ()
    read = {(row.place_id, row.key): row for row in rows}
    return {
        (place.deployment_id, place.region_id): tuple(
            _metric_value(metric, read.get((place.pk, metric.key)), now) for metric in metrics
        )
        for place, metrics in wanted.values()
    }


def _metric_value(metric: CloudMetric, row: MetricReading | None, now: datetime) -> MetricValue:
    if row is None:
        return MetricValue(metric, None)
    is_fresh = row.at is not None and (now - row.at).total_seconds() <= METRIC_PERIODS * metric.period_s + METRIC_LATE_S
    if row.value is None or not is_fresh:
        old = f"the last one is of {row.at:%H:%M} UTC" if row.at is not None else ""
        return MetricValue(metric, None, "; ".join(part for part in (row.problem, old) if part))
    return MetricValue(metric, row.value)


def scaling_state(place: DeploymentRegion) -> ScalingState | None:
    """The latest check of a place, or None."""
    return getattr(place, "scaling_state", None)


def scaling_mode(deployment: Deployment) -> ScalingMode:
    """The policy's mode. An invalid policy changes nothing."""
    try:
        return deployment.scaling_policy().mode
    except InvalidScaling:
        return ScalingMode.SHADOW


def is_acting(policy: ScalingPolicy, is_paused: bool) -> bool:
    """Whether decisions are carried out."""
    return policy.mode is ScalingMode.ACT and not is_paused


def need_history(state: ScalingState | None) -> tuple[NeedSample, ...]:
    """The stored need samples of a place, oldest first."""
    rows = state.history if state else []
    return tuple(NeedSample(datetime.fromtimestamp(at, UTC), cells) for at, cells in rows)


def _ranged(
    row: Deployment,
    started: list[float] | None,
    is_rolling: bool,
    price: Callable[[str, str], float],
    types: Mapping[Place, Counter[str]],
) -> RangedDeployment:
    policy, spec = row.scaling_policy(), row.model_version.spec()
    ready_timeout_s = max(spec.on(kind).ready_timeout_s for kind in row.instance_types)
    places = tuple(sorted(row.regions.all(), key=lambda place: place.region_id))
    prices = {place.region_id: {kind: price(place.region_id, kind) for kind in row.instance_types} for place in places}
    means = {region: _mean_price(there, types.get((row.name, region))) for region, there in prices.items()}
    return RangedDeployment(
        deployment=row,
        policy=policy,
        places=tuple(place for place in places if place.range),
        start_up_s=policy.start_up_s or typical_s(started, ready_timeout_s),
        cell_prices={place.region_id: means[place.region_id] for place in places if place.range},
        type_prices={region: {kind: usd for kind, usd in there.items() if usd} for region, there in prices.items()},
        elsewhere_price=sum(place.cells * means[place.region_id] for place in places if not place.range),
        is_rolling=is_rolling,
    )


def _cell_price(row: Deployment, prices: MachinePrices, now: datetime, region: str, kind: str) -> float:
    """US dollars per hour for a cell on a type in a region, or 0 if unknown."""
    return nodes_per_cell(row.model_version.spec(), kind) * (prices.of(region, kind, now).usd or 0.0)


def _mean_price(prices: Mapping[str, float], there: Counter[str] | None) -> float:
    """Mean over the current cells, or the price on the preferred type without cells."""
    counted = {kind: count for kind, count in (there or {}).items() if kind in prices}
    if not counted:
        return next(iter(prices.values()))
    return sum(prices[kind] * count for kind, count in counted.items()) / sum(counted.values())


CellsByType = dict[Place, Counter[str]]


def _cells_there(names: Iterable[str]) -> tuple[dict[Place, list[datetime]], CellsByType, CellsByType]:
    ready: dict[Place, list[datetime]] = defaultdict(list)
    types: CellsByType = defaultdict(Counter)
    waiting: CellsByType = defaultdict(Counter)
    leaving = (CellState.STOPPED.value, CellState.DRAINING.value)
    cells = Cell.objects.filter(deployment__in=names).exclude(state__in=leaving)
    columns = ("deployment_id", "region_id", "instance_type_id", "state", "state_since")
    for deployment, region, kind, state, since in cells.values_list(*columns):
        place = (deployment, region)
        if state == CellState.READY:
            ready[place].append(since)
        (waiting if state in (CellState.PENDING, CellState.LOST) else types)[place][kind] += 1
    return ready, types, waiting


def _served(ranged: Iterable[RangedDeployment], now: datetime) -> dict[Place, ServedObjective]:
    subjects = {
        deployment_subject(one.deployment.name, place.region_id): (one, place.region_id)
        for one in ranged
        for place in one.places
    }
    since = now - timedelta(seconds=OBJECTIVE_SEEN_S)
    windows = LoadWindow.objects.filter(subject__name__in=list(subjects), step_s=FINE_S, at__gte=since, at__lt=now)
    counts: dict[str, list[RequestCounts]] = defaultdict(list)
    itl_ms: dict[str, list[float]] = defaultdict(list)
    for name, requests, errors, slow, itl in windows.values_list(
        "subject__name", "requests", "errors", "slow", "itl_p95_ms"
    ):
        counts[name].append(RequestCounts(requests, errors, slow))
        itl_ms[name] += [itl] if itl is not None else []
    return {
        (one.deployment.name, region): ServedObjective(
            late_burn(one.deployment.objective(), total(counts[name])),
            median(itl_ms[name]) if itl_ms[name] else None,
        )
        for name, (one, region) in subjects.items()
    }


"""Deployment, region."""


def newest_plan() -> DayPlan | None:
    return DayPlan.objects.order_by("-at").first()


def place_plans(now: datetime, deployments: Iterable[str] | None = None) -> dict[Place, PlacePlan]:
    """Cells that the newest plan has in each place, of all deployments or of these. Empty if the plan is too old. Two
    queries, or one without a plan."""
    plan = DayPlan.objects.filter(at__gt=now - timedelta(seconds=FRESH_S), at__lte=now).order_by("-at").first()
    if plan is None:
        return {}
    rows = DayPlanPlace.objects.filter(plan=plan).select_related("plan")
    if deployments is not None:
        rows = rows.filter(deployment__in=list(deployments))
    return {(row.deployment_id, row.region_id): row.slots() for row in rows}


PLANNED_CELLS_OF = ("fleet_dayplan", "fleet_scalingswitch", "fleet_deployment", "fleet_deploymentregion")
"""Tables that `planned_place_cells` reads. A plan's places are never written without the plan."""


def planned_place_cells() -> tuple[PlannedPlaceCells, ...]:
    """Cells that the newest plan has where the autoscaler acts, even if the plan is old. Empty while it is paused. Two
    queries without a plan, otherwise four."""
    plan = None if scaling_switch().paused else newest_plan()
    if plan is None:
        return ()
    ranged = DeploymentRegion.objects.filter(cells_max__isnull=False).select_related("deployment")
    acting = {
        (row.deployment_id, row.region_id): row.deployment.instance_types
        for row in ranged
        if scaling_mode(row.deployment) is ScalingMode.ACT
    }
    return tuple(
        PlannedPlaceCells(
            row.deployment_id, row.region_id, plan.at, plan.slot_s, tuple(row.by_type[kind]), row.start_up_s, kind
        )
        for row in plan.places.all()
        for kind in acting.get((row.deployment_id, row.region_id), ())
        if kind in row.by_type and row.budget
    )
