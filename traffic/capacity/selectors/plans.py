"""Reads the input of the role planner and of the plan of the day in a constant number of queries: places, counters and
step times of cells, expected load, due batches, and available machines. It never writes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F

from engine_agent.protocol.states import CellRole
from fleet.autoscaling.models import RoleState
from fleet.autoscaling.planning.needs import BELOW_CAP
from fleet.autoscaling.planning.policy import InvalidScaling, RolesBy, ScalingPolicy
from fleet.autoscaling.planning.role_split import RoleSplit, split_within
from fleet.autoscaling.planning.roles import (
    Counted,
    CountedCell,
    RatioView,
    RoleLimits,
    RolePace,
    demand_between,
    measured_handover_s,
)
from fleet.autoscaling.selectors import CREATED, is_acting, scaling_switch, start_times_s, typical_s
from fleet.capacity.planning.forecast_series import SLOT_S, SLOTS
from fleet.capacity.planning.view import (
    BatchWork,
    CapacityView,
    CellKind,
    Demand,
    PlannedDeployment,
    PlannedPlace,
    within_budget,
)
from fleet.capacity.selectors import machine_pools, machine_prices
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.selectors import concurrency_on
from fleet.nodes.models import NodeReport, holds_since
from fleet.reconcile.planning.states import CellState
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from models_registry.versions.planning.engine_arguments import nodes_per_cell
from models_registry.versions.planning.roles import role_spec
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec
from traffic.batches.models import OPEN_STATES, Batch
from traffic.batches.selectors import line_times, open_work, served_names
from traffic.demand.models import DemandForecast
from traffic.demand.planner import Place
from traffic.demand.selectors import FORECAST_FRESH_FOR, FRESH_FOR, expected_loads
from traffic.region_shares.models import TrafficMatrix
from traffic.region_shares.planning.policy import TrafficPolicy
from traffic.region_shares.selectors.traffic import traffic_policies
from traffic.usage.models import TokenFit
from traffic.usage.planning.prices import FIT_KEPT

REPLAN_S = 300.0
"""Minimum time between two decisions of a place, unless its number of cells changes."""
HANDOVER_S = 0.005
HANDOVER_TOKEN_S = 0.33e6 / 12.5e9
"""Until a handover is measured: 0.33 MB per token (a 70B model with grouped heads in 16 bits) at 100 Gbit/s."""
CHUNK_OPTIONS = ("max_num_batched_tokens", "prefill_chunk_tokens")
CHUNK_TOKENS = 2048
"""Prompt tokens per step if the version states none: vLLM's default for serving."""


@dataclass(frozen=True, slots=True)
class PlaceOfRoles:
    """A place for the planner, and its row as read. `figures`: observations by name."""

    row: DeploymentRegion
    view: RatioView
    acting: bool
    figures: Mapping[str, float | None]
    counted: Mapping[str, Any]


def planned_places(now: datetime) -> list[PlaceOfRoles]:
    rows = DeploymentRegion.objects.filter(deployment__scaling__roles=RolesBy.PLANNED.value)
    rows = rows.select_related("deployment__model_version", "role_state").order_by("deployment_id", "region_id")
    due = [row for row in rows if _is_due(row, now)]
    if not due:
        return []
    names = {row.deployment_id for row in due}
    counted, is_paused = _counted_cells(names, now), scaling_switch().paused
    expected = expected_loads(now, dict.fromkeys(names, REPLAN_S))
    rolling = set(
        Rollout.objects.filter(deployment__in=names, state__in=ACTIVE).values_list("deployment_id", flat=True)
    )
    fits = _token_fits({row.deployment.model_version.reference for row in due}, now)
    return [
        _place_of_roles(
            row, policy, counted, expected, fits, is_rolling=row.deployment_id in rolling, is_paused=is_paused, now=now
        )
        for row in due
        if (policy := _scaling_policy(row.deployment)) is not None
    ]


def role_state(place: DeploymentRegion) -> RoleState | None:
    return getattr(place, "role_state", None)


def _is_due(row: DeploymentRegion, now: datetime) -> bool:
    state = role_state(row)
    return state is None or state.wanted.total != row.cells or now - state.looked_at >= timedelta(seconds=REPLAN_S)


def _scaling_policy(deployment: Deployment) -> ScalingPolicy | None:
    """Returns None if it is unreadable; nothing is decided then."""
    try:
        return deployment.scaling_policy()
    except InvalidScaling:
        return None


def _place_of_roles(
    row: DeploymentRegion,
    policy: ScalingPolicy,
    counted: Mapping[Place, Counted],
    expected: Mapping[Place, float],
    fits: Mapping[tuple[str, str], TokenFit],
    *,
    is_rolling: bool,
    is_paused: bool,
    now: datetime,
) -> PlaceOfRoles:
    place, state, deployment = (row.deployment_id, row.region_id), role_state(row), row.deployment
    there = counted.get(place, {})
    before = _counted_before(state)
    passed_s = (now - state.looked_at).total_seconds() if state else 0.0
    demand = demand_between(before, there, passed_s, expected.get(place))
    pace = _role_pace(fits.get((deployment.model_version.reference, deployment.instance_types[0])), deployment, there)
    acting = is_acting(policy, is_paused)
    view = RatioView(
        cells=row.cells,
        current=_current_split(row, state, acting=acting),
        limits=RoleLimits(deployment.objective().ttft_ms / 1000, policy.itl_p99_ms / 1000),
        pace=pace,
        demand=demand,
        is_rolling=is_rolling,
        from_tokens=state.from_tokens if state else None,
    )
    figures = {**(asdict(demand) if demand else {}), **(asdict(pace) if pace else {})}
    return PlaceOfRoles(row, view, acting, figures, {name: asdict(cell) for name, cell in there.items()})


def _current_split(row: DeploymentRegion, state: RoleState | None, *, acting: bool) -> RoleSplit:
    """In shadow mode, the last decision itself is kept."""
    if state is not None and not acting:
        return state.wanted
    return split_within(row.cells, row.prefill, row.decode)


def _counted_before(state: RoleState | None) -> Counted:
    stored: dict[str, dict[str, Any]] = state.counted if state else {}
    return {name: CountedCell(**{**cell, "role": CellRole(cell["role"])}) for name, cell in stored.items()}


def _counted_cells(deployments: Iterable[str], now: datetime) -> dict[Place, dict[str, CountedCell]]:
    cell = "node__member__cell__"
    reports = NodeReport.objects.filter(
        holds_since(now - FRESH_FOR),
        node__member__rank=0,
        node__member__cell__deployment__in=deployments,
        cell=F("node__member__cell_id"),
        generation=F("node__member__cell__generation"),
        load__isnull=False,
    )
    found: dict[Place, dict[str, CountedCell]] = defaultdict(dict)
    columns = (f"{cell}deployment_id", f"{cell}region_id", "cell", "generation", f"{cell}role", "load")
    for deployment, region, name, generation, role, load in reports.values_list(*columns):
        found[deployment, region][name] = _counted_cell(generation, CellRole(role), load)
    return found


def _counted_cell(generation: int, role: CellRole, load: Mapping[str, Any]) -> CountedCell:
    usage, handovers = load.get("usage") or (), load.get("handovers") or {}
    transfer_ms = handovers.get("transfer_p50_ms")
    return CountedCell(
        generation=generation,
        role=role,
        requests=sum(row.get("requests_total", 0) for row in usage),
        prompt_tokens=sum(row.get("prompt_tokens_total", 0) for row in usage),
        cached_tokens=sum(row.get("cached_tokens_total", 0) for row in usage),
        completion_tokens=sum(row.get("completion_tokens_total", 0) for row in usage),
        read_tokens=handovers.get("prefill_tokens_total", 0),
        in_flight=max(0, load.get("in_flight", 0)),
        handover_s=None if transfer_ms is None else transfer_ms / 1000,
    )


def _token_fits(versions: Iterable[str], now: datetime) -> dict[tuple[str, str], TokenFit]:
    rows = TokenFit.objects.filter(version__in=list(versions), fitted_at__gte=now - timedelta(days=FIT_KEPT))
    return {(row.version, row.instance_type): row for row in rows}


def _role_pace(fit: TokenFit | None, deployment: Deployment, there: Counted) -> RolePace | None:
    if fit is None:
        return None
    spec, kind = deployment.model_version.spec(), deployment.instance_types[0]
    try:
        prefill, decode = (role_spec(spec, role, kind) for role in (CellRole.PREFILL, CellRole.DECODE))
    except InvalidVersion:
        return None
    measured = measured_handover_s(there)
    return RolePace(
        step_s=fit.step_us / 1e6,
        sequence_s=fit.sequence_us / 1e6,
        prompt_token_s=fit.prompt_us / 1e6,
        chunk_tokens=_chunk_tokens(prefill),
        most_at_once=decode.max_concurrency,
        handover_s=HANDOVER_S if measured is None else measured,
        handover_token_s=HANDOVER_TOKEN_S if measured is None else 0.0,
    )


def _chunk_tokens(spec: VersionSpec) -> int:
    stated = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    found = next((stated[name] for name in CHUNK_OPTIONS if name in stated), CHUNK_TOKENS)
    return found if isinstance(found, int) and found > 0 else CHUNK_TOKENS


BATCH = "batch"
COLD_S = 60.0
"""Equivalent extra work of a cell without cached prefixes: the cost of a start besides its machines. An assumption, not
measured."""
THERE = (CellState.PENDING.value, CellState.STARTING.value, CellState.READY.value)
DeploymentInRegion = tuple[str, str]
"""Deployment, region."""


@dataclass(frozen=True, slots=True)
class _Known:
    """State of all places. `cells` of a deployment in a region on a type; `start_s` has durations of a deployment's
    starts."""

    at: datetime
    now: datetime
    demands: Mapping[DeploymentInRegion, Demand]
    works: Mapping[DeploymentInRegion, tuple[BatchWork, ...]]
    cells: Mapping[tuple[str, str, str], int]
    policies: Mapping[str, TrafficPolicy]
    start_s: Mapping[str, list[float]]


def capacity_view(now: datetime) -> CapacityView | None:
    """Returns None if there is no recent forecast."""
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
        _expected_demand(rows, at),
        _batch_work(deployments, now),
        cells,
        traffic_policies(),
        start_times_s([one.name for one in deployments], since=CREATED),
    )
    prices = machine_prices()
    planned = []
    for one in deployments:
        found = _planned_deployment(one, known, lambda region, kind: prices.of(region, kind, now).usd or 0.0)
        planned += [found] if found else []
    groups = {(place.region, kind.instance_type) for one in planned for place in one.places for kind in one.kinds}
    return CapacityView(at, tuple(planned), machine_pools(groups, now))


def _planned_deployment(one: Deployment, known: _Known, price: Callable[[str, str], float]) -> PlannedDeployment | None:
    """Returns None if it has no place or its stored settings are invalid; the deployment's page shows the error."""
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
    places = within_budget(tuple(_planned_place(row, known) for row in rows), dearest, scaling.budget_per_hour)
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


def _planned_place(row: DeploymentRegion, known: _Known) -> PlannedPlace:
    """If an operator sets the number of cells, the plan uses it."""
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


def _expected_demand(rows: Iterable[DemandForecast], at: datetime) -> dict[DeploymentInRegion, Demand]:
    """Load of a deployment's series in each region at the present shares. The last slot of an older forecast extends to
    the end."""
    names = {row.deployment_id for row in rows}
    shares = dict(TrafficMatrix.objects.filter(deployment__in=names).values_list("deployment_id", "shares"))
    p50: dict[DeploymentInRegion, list[float]] = defaultdict(lambda: [0.0] * SLOTS)
    p90: dict[DeploymentInRegion, list[float]] = defaultdict(lambda: [0.0] * SLOTS)
    for row in rows:
        passed = round((at - row.made_at).total_seconds() / SLOT_S)
        for region, share in shares.get(row.deployment_id, {}).get(row.origin_id, {row.origin_id: 1.0}).items():
            place = (row.deployment_id, region)
            for sums, values in ((p50[place], row.p50), (p90[place], row.p90)):
                for slot in range(SLOTS):
                    sums[slot] += share * values[min(slot + passed, len(values) - 1)]
    return {place: Demand(tuple(sums), tuple(p90[place])) for place, sums in p50.items()}


def _batch_work(deployments: Iterable[Deployment], now: datetime) -> dict[DeploymentInRegion, tuple[BatchWork, ...]]:
    """Lines of waiting batches, as concurrent requests times seconds, at the service time without queueing. Without a
    known time, they cannot be planned."""
    batches = list(Batch.objects.filter(state__in=OPEN_STATES, expires_at__gt=now))
    if not batches:
        return {}
    served, line_s = served_names(deployments), line_times(one.name for one in deployments)
    found = defaultdict(list)
    for each in open_work(batches):
        batch, left = each.batch, each.remaining
        place = (served.get(each.model, ""), batch.region_id)
        if place in line_s and left > 0:
            within_s, is_late = (batch.expires_at - now).total_seconds(), batch.cells_asked_at is not None
            work = BatchWork(left * line_s[place], within_s, is_late)
            found[place].append(work)
    return {place: tuple(works) for place, works in found.items()}
