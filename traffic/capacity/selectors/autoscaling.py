"""Reads the autoscaler's input in a constant number of queries: places with a range, reported load, the autopilot's
shares, and unserved work (requests that ingresses hold, requests that other regions serve, queued batches and
near-real-time requests). Unserved work counts for its own region, or for the nearest allowed one with a range. It never
writes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection

from fleet.autoscaling.models import RoleState
from fleet.autoscaling.planning.needs import DECISION_S, PlaceLoad, PlannedNeed, ScaledPlace, ScalingView
from fleet.autoscaling.planning.policy import ScalingPolicy
from fleet.autoscaling.planning.role_split import split_within
from fleet.autoscaling.selectors import (
    Place,
    RangedDeployment,
    RangedFleet,
    ServedObjective,
    is_acting,
    need_history,
    place_plans,
    ranged_fleet,
    scaling_state,
)
from fleet.capacity.planning.view import PlacePlan, need_within
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.selectors import concurrency_on
from fleet.placement.planning.instance_types import TypeChoice, cheapest_first
from traffic.batches.models import Batch
from traffic.batches.planning.batch import BatchState
from traffic.batches.selectors import open_work
from traffic.demand.planner import BATCH_CLASS, LEAST_LEFT_S, QueuedWork, requests_at_once, work_until
from traffic.demand.selectors import batch_work_shares, expected_loads
from traffic.region_shares.models import TrafficMatrix, TrafficWindow
from traffic.region_shares.planning.autopilot import AutopilotSettings
from traffic.region_shares.planning.load import held, mean_load, served_elsewhere
from traffic.region_shares.planning.placement import latencies_ms
from traffic.region_shares.planning.policy import TrafficPolicy
from traffic.region_shares.selectors.traffic import IngressView, ingress_views, samples_of, traffic_policies
from traffic.routing.planning.tables import ServedDeployment, resolve_model_names
from traffic.routing.selectors import served_deployments

_QUEUED = """
SELECT region_id, model, count(*), sum(1 / greatest(extract(epoch FROM deadline_at - %s), %s))
FROM traffic_asyncrequest WHERE ended_at IS NULL AND deadline_at > %s GROUP BY region_id, model
"""


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """By place: held requests, requests served by other regions, and queued work."""

    held: Mapping[Place, float] = field(default_factory=dict)
    elsewhere: Mapping[Place, float] = field(default_factory=dict)
    queued: Mapping[Place, QueuedWork] = field(default_factory=dict)


def waiting_load(
    fleet: RangedFleet,
    ingresses: Mapping[str, Iterable[IngressView]],
    policies: Mapping[str, TrafficPolicy],
    now: datetime,
) -> WaitingLoad:
    """`ingresses` are those of each region with recent reports."""
    places = {one.deployment.name: [row.region_id for row in one.places] for one in fleet.deployments}
    nearest = _Nearest(places, policies)
    waits: dict[Place, float] = defaultdict(float)
    away: dict[Place, float] = defaultdict(float)
    for region, there in ingresses.items():
        for name in places:
            here = sum(held(one.telemetry, name) for one in there)
            if here and (place := nearest.place(name, region)):
                waits[place] += here
            away[name, region] += sum(served_elsewhere(one.telemetry, name) for one in there)
    return WaitingLoad(waits, away, _queued_work(nearest, now))


class _Nearest:
    def __init__(self, places: Mapping[str, list[str]], policies: Mapping[str, TrafficPolicy]) -> None:
        self.names = frozenset(places)
        self._places, self._policies = places, policies

    def place(self, deployment: str, origin: str) -> Place | None:
        ranged = self._places[deployment]
        if origin in ranged:
            return deployment, origin
        policy = self._policies.get(deployment, TrafficPolicy())
        may = [region for region in ranged if policy.may_serve(origin, region)]
        far = latencies_ms({origin, *may}, settings.REGION_LATENCY_MS)
        return (deployment, min(may, key=lambda region: (far[origin, region], region))) if may else None


def _queued_work(nearest: _Nearest, now: datetime) -> dict[Place, QueuedWork]:
    deployments = resolve_model_names(served_deployments())
    queued: dict[Place, QueuedWork] = defaultdict(QueuedWork)
    for region, model, work in (*_async_work(now), *_batch_work(now)):
        name = _deployment_of(model, deployments)
        if name in nearest.names and (place := nearest.place(name, region)):
            queued[place] += work
    return queued


def _deployment_of(model: str, deployments: Iterable[ServedDeployment]) -> str:
    return next((one.name for one in deployments if model in one.models or model in one.adapters), "")


def _async_work(now: datetime) -> Iterable[tuple[str, str, QueuedWork]]:
    with connection.cursor() as cursor:
        cursor.execute(_QUEUED, [now, LEAST_LEFT_S, now])
        return [(region, model, QueuedWork(count, float(per_s))) for region, model, count, per_s in cursor.fetchall()]


def _batch_work(now: datetime) -> Iterable[tuple[str, str, QueuedWork]]:
    batches = list(Batch.objects.filter(state=BatchState.IN_PROGRESS.value, expires_at__gt=now).order_by())
    return [
        (each.batch.region_id, each.model, work_until(each.remaining, (each.batch.expires_at - now).total_seconds()))
        for each in (open_work(batches) if batches else ())
    ]


FRESH_FOR = timedelta(seconds=AutopilotSettings().stale_after_s)
"""Age limit of reports, as in the region autopilot."""
ROLES_FRESH_FOR = timedelta(minutes=15)
"""Three passes of the role planner."""
TARGET = ScalingPolicy().target_utilisation
"""Below this utilisation, cells have room for requests of other regions."""


@dataclass(frozen=True, slots=True)
class ScaledDeployment:
    """A deployment for the planner. `rows` maps a region to the row that was read; `acting`: decisions are applied."""

    view: ScalingView
    rows: Mapping[str, DeploymentRegion]
    acting: bool


def scaled_deployments(now: datetime, deployment: str = "") -> tuple[tuple[ScaledDeployment, ...], Mapping[str, str]]:
    """Returns deployments with a range, or this one; and errors of invalid ones by name."""
    fleet = ranged_fleet(now, deployment)
    if not fleet.deployments:
        return (), fleet.problems
    policies = traffic_policies()
    loads, roomy = _place_loads(fleet, policies, now)
    scaled = tuple(
        _scaled_deployment(one, fleet, loads, policies.get(one.deployment.name, TrafficPolicy()), now)
        for one in fleet.deployments
    )
    plans = place_plans(now, [one.deployment.name for one in fleet.deployments])
    views = (
        replace(_with_plans(one.view, plans, now), is_full_elsewhere=one.view.deployment not in roomy) for one in scaled
    )
    return tuple(replace(one, view=view) for one, view in zip(scaled, views, strict=True)), fleet.problems


def _with_plans(view: ScalingView, plans: Mapping[Place, PlacePlan], now: datetime) -> ScalingView:
    def planned(place: ScaledPlace) -> ScaledPlace:
        plan = plans.get((view.deployment, place.region))
        return place if plan is None else replace(place, planned=need_within(plan, now, view.start_up_s))

    return replace(view, places=tuple(planned(place) for place in view.places))


def _scaled_deployment(
    one: RangedDeployment, fleet: RangedFleet, loads: Mapping[Place, PlaceLoad], policy: TrafficPolicy, now: datetime
) -> ScaledDeployment:
    acting = is_acting(one.policy, fleet.is_paused)
    name = one.deployment.name
    capacities = _Capacities(one, policy)
    view = ScalingView(
        deployment=name,
        policy=one.policy,
        per_cell=capacities.of(one.deployment.instance_types[0]),
        utilisation_cap=policy.utilisation_cap,
        start_up_s=one.start_up_s,
        places=tuple(
            replace(
                _scaled_place(
                    row, fleet.ready.get((name, row.region_id), []), loads.get((name, row.region_id)), acting, now
                ),
                cell_price=one.cell_prices[row.region_id],
                capacities=capacities.in_turn((name, row.region_id), fleet),
                metrics=fleet.metrics.get((name, row.region_id), ()),
            )
            for row in one.places
        ),
        elsewhere_price=one.elsewhere_price,
        is_rolling=one.is_rolling,
    )
    return ScaledDeployment(view, {row.region_id: row for row in one.places}, acting)


@dataclass(frozen=True, slots=True)
class _Capacities:
    one: RangedDeployment
    policy: TrafficPolicy

    def of(self, instance_type: str) -> float:
        version = self.one.deployment.model_version
        return float(self.policy.tested_on(instance_type) or concurrency_on(version, instance_type))

    def in_turn(self, place: Place, fleet: RangedFleet) -> tuple[float, ...]:
        """Returns the cells of a place in the order in which they stay: existing cells, cheapest for their load first,
        then one of the type of the next cell: the cheapest type on which no cell waits for machines."""
        kinds = self.one.deployment.instance_types
        if len(kinds) == 1:
            return ()
        prices = self.one.type_prices[place[1]]
        choices = [TypeChoice(kind, self.of(kind), prices.get(kind)) for kind in kinds]
        order = [choice.name for choice in cheapest_first(choices)]
        there, waiting = (cells.get(place, Counter[str]()) for cells in (fleet.types, fleet.waiting))
        next_one = next((kind for kind in order if not waiting.get(kind)), order[0])
        return tuple(self.of(kind) for kind in (*(k for k in order for _ in range(there.get(k, 0))), next_one))


def _scaled_place(
    row: DeploymentRegion, ready: list[datetime], load: PlaceLoad | None, acting: bool, now: datetime
) -> ScaledPlace:
    """In shadow mode, the last decision itself is kept, to show what it would have led to."""
    state, cells = scaling_state(row), row.range
    if cells is None:
        raise ValueError(f"{row} has no range")
    return ScaledPlace(
        region=row.region_id,
        range=cells,
        current=row.cells if acting or state is None else state.wanted,
        ready=len(ready),
        ready_for_s=(now - max(ready)).total_seconds() if ready else None,
        load=load,
        history=need_history(state),
        idle_since=state.idle_since if state else None,
        granted=row.cells_granted,
        grant_reason=row.grant_reason,
        answering=_answering_share(row),
        roles=_roles_need(row, now),
    )


def _answering_share(row: DeploymentRegion) -> float:
    split = split_within(row.cells, row.prefill, row.decode)
    return split.answering / split.total if split.total else 1.0


def _roles_need(row: DeploymentRegion, now: datetime) -> PlannedNeed | None:
    state: RoleState | None = getattr(row, "role_state", None)
    if state is None or not state.acting or not state.needed or now - state.looked_at > ROLES_FRESH_FOR:
        return None
    return PlannedNeed(state.needed, state.reason)


def _place_loads(
    fleet: RangedFleet, policies: Mapping[str, TrafficPolicy], now: datetime
) -> tuple[dict[Place, PlaceLoad], set[str]]:
    """Loads of places whose ingresses have all reported recently, and deployments with room in regions without a range.
    User-facing waiting time counts whichever ingress reports it."""
    fresh = {
        region: there
        for region, there in ingress_views().items()
        if all(one.seen_at is not None and now - one.seen_at <= FRESH_FOR for one in there)
    }
    waiting = waiting_load(fleet, fresh, policies, now)
    places = {(row.deployment_id, row.region_id): row for one in fleet.deployments for row in one.places}
    names = [one.deployment.name for one in fleet.deployments]
    sent, loads, roomy = _sent_by_autopilot(names, now), dict[Place, PlaceLoad](), set[str]()
    batch_shares = _opportunistic_shares(fleet, now)
    expected = expected_loads(now, {one.deployment.name: one.start_up_s + DECISION_S for one in fleet.deployments})
    for window in TrafficWindow.objects.filter(deployment__in=names, region__in=fresh):
        place = (window.deployment_id, window.region_id)
        samples = samples_of(window)
        own = 1.0 - batch_shares.get(place, 0.0)
        mean = mean_load(samples, now.timestamp(), part=own)
        if mean is not None and place not in places and mean.in_service + mean.queued < TARGET * samples[-1].capacity:
            roomy.add(window.deployment_id)
        if mean is not None and place in places:
            served = fleet.served.get(place, ServedObjective())
            took_s = mean.service_s or _service_s_before(places[place])
            sent_there = sent[window.deployment_id].get(window.region_id)
            loads[place] = PlaceLoad(
                mean.in_service,
                mean.queued,
                offered=None if took_s is None else mean.to_cells_per_s * took_s,
                service_s=took_s,
                autopilot=None if sent_there is None else sent_there * own,
                forecast=expected.get(place),
                late_burn=served.late_burn,
                itl_p95_ms=served.itl_p95_ms,
                held=waiting.held.get(place, 0.0),
                arrivals_per_s=mean.to_cells_per_s,
                elsewhere=waiting.elsewhere.get(place, 0.0),
                backlog=requests_at_once(waiting.queued.get(place, QueuedWork()), took_s),
                backlog_requests=waiting.queued.get(place, QueuedWork()).requests,
            )
    return loads, roomy


def _opportunistic_shares(fleet: RangedFleet, now: datetime) -> dict[Place, float]:
    """Share of a place's load that is opportunistic batch work. It fills any free capacity, so it asks for cells only
    through its backlog and the plan of the day. Does not apply to deployments for batch work."""
    own = {one.deployment.name for one in fleet.deployments if one.deployment.serving_class == BATCH_CLASS}
    return {place: share for place, share in batch_work_shares(now).items() if place[0] not in own}


def _service_s_before(row: DeploymentRegion) -> float | None:
    """Last service time without queueing, from the previous pass."""
    state = scaling_state(row)
    known: float | None = state.load.get("service_s") if state else None
    return known


def _sent_by_autopilot(names: list[str], now: datetime) -> dict[str, dict[str, float]]:
    sent: dict[str, dict[str, float]] = defaultdict(dict)
    matrices = TrafficMatrix.objects.filter(deployment__in=names, looked_at__gte=now - FRESH_FOR)
    for name, figures in matrices.values_list("deployment_id", "figures"):
        sent[name] = {region: seen["load"] for region, seen in figures.get("regions", {}).items()}
    return sent
