"""What is known of places where cells are a range: their rows, the cells that serve there, how users are served, and
how long a cell takes until it serves. In a constant number of queries however many there are."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import median

from django.db.models import Prefetch

from fleet.models import Cell, Deployment, DeploymentRegion, LoadWindow, Rollout, ScalingState, ScalingSwitch
from fleet.planning.autoscaling.needs import OBJECTIVE_SEEN_S
from fleet.planning.autoscaling.policy import InvalidScaling, ScalingMode, ScalingPolicy
from fleet.planning.autoscaling.view import NeedSample
from fleet.planning.load.history import FINE_S
from fleet.planning.load.slo import RequestCounts, late_burn, total
from fleet.planning.rate import MachinePrices
from fleet.planning.states import CellState
from fleet.selectors.history import deployment_subject
from fleet.selectors.rate import machine_prices
from fleet.selectors.rollout import ACTIVE
from fleet.selectors.start_up import CREATED, start_times_s, typical_s
from models_registry.planning.engine_arguments import nodes_per_cell
from models_registry.planning.version_spec import InvalidVersion

Place = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class ServedObjective:
    """How users of a place were served over `OBJECTIVE_SEEN_S`. None: no request to judge by."""

    late_burn: float | None = None
    itl_p95_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RangedDeployment:
    """A deployment that has a range somewhere. `places`: those alone, with their last looks; `cell_prices`: US dollars
    an hour for a cell by their regions, 0: unknown; `type_prices`: by region what a cell on each type costs, if known;
    `elsewhere_price`: for the cells where it has no range."""

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
    """`ready`: since when each cell that serves in a place has; `types`: how many of its cells that stay are on which
    instance type, and `waiting`: how many more wait for machines of it; `problems`: by deployment, what is stored and
    makes no sense: such a one is left as it is."""

    deployments: tuple[RangedDeployment, ...] = ()
    ready: Mapping[Place, list[datetime]] = field(default_factory=dict)
    types: Mapping[Place, Counter[str]] = field(default_factory=dict)
    waiting: Mapping[Place, Counter[str]] = field(default_factory=dict)
    served: Mapping[Place, ServedObjective] = field(default_factory=dict)
    is_paused: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)


def scaling_switch() -> ScalingSwitch:
    """The fleet's switch; on, by nobody, until it was used."""
    return ScalingSwitch.objects.first() or ScalingSwitch(paused=False, actor="")


def has_ranges() -> bool:
    """Whether there is anything to scale."""
    return DeploymentRegion.objects.filter(cells_max__isnull=False).exists()


def ranged_fleet(now: datetime, deployment: str = "") -> RangedFleet:
    """All deployments with a range, or this one."""
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
    return RangedFleet(tuple(found), ready, types, waiting, served, is_paused, problems)


def scaling_state(place: DeploymentRegion) -> ScalingState | None:
    """The last look at a place; None: there was none yet."""
    return getattr(place, "scaling_state", None)


def scaling_mode(deployment: Deployment) -> ScalingMode:
    """Its policy's; a policy that cannot be read does nothing."""
    try:
        return deployment.scaling_policy().mode
    except InvalidScaling:
        return ScalingMode.SHADOW


def is_acting(policy: ScalingPolicy, is_paused: bool) -> bool:
    """Whether what is decided is carried out."""
    return policy.mode is ScalingMode.ACT and not is_paused


def need_history(state: ScalingState | None) -> tuple[NeedSample, ...]:
    """What is remembered of a place, oldest first."""
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
    """US dollars an hour for a cell on a type in a region; 0: nobody states it."""
    return nodes_per_cell(row.model_version.spec(), kind) * (prices.of(region, kind, now).usd or 0.0)


def _mean_price(prices: Mapping[str, float], there: Counter[str] | None) -> float:
    """Of the cells that are there; of one on the preferred type where there are none."""
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
