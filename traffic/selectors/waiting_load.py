"""Loads who asks for cells and is worked on by none here: requests that ingresses hold, those that other regions serve,
and what batches and near-real-time requests have queued. Each counts for the region that would have to serve it: its
own, or the nearest that may where that one has no range. In a constant number of queries."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.conf import settings
from django.db import connection

from fleet.selectors.autoscaling import Place, RangedFleet
from traffic.models import Batch
from traffic.planning.backlog import LEAST_LEFT_S, QueuedWork, work_until
from traffic.planning.batch import BatchState
from traffic.planning.demand_placement import latencies_ms
from traffic.planning.load_window import held, served_elsewhere
from traffic.planning.routing import ServedDeployment, resolve_model_names
from traffic.planning.traffic_policy import TrafficPolicy
from traffic.selectors.batch import tallies
from traffic.selectors.routing import served_deployments
from traffic.selectors.steering import IngressView

_QUEUED = """
SELECT region_id, model, count(*), sum(1 / greatest(extract(epoch FROM deadline_at - %s), %s))
FROM traffic_asyncrequest WHERE ended_at IS NULL AND deadline_at > %s GROUP BY region_id, model
"""


@dataclass(frozen=True, slots=True)
class WaitingLoad:
    """By place: requests that are held, that other regions serve, and work that is queued."""

    held: Mapping[Place, float] = field(default_factory=dict)
    elsewhere: Mapping[Place, float] = field(default_factory=dict)
    queued: Mapping[Place, QueuedWork] = field(default_factory=dict)


def waiting_load(
    fleet: RangedFleet,
    ingresses: Mapping[str, Iterable[IngressView]],
    policies: Mapping[str, TrafficPolicy],
    now: datetime,
) -> WaitingLoad:
    """`ingresses`: of each region, those whose reports count."""
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
    return WaitingLoad(waits, away, _queued(nearest, now))


class _Nearest:
    """Finds the region with a range that serves a deployment's requests of a region."""

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


def _queued(nearest: _Nearest, now: datetime) -> dict[Place, QueuedWork]:
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
    done = tallies(batches) if batches else {}
    return [
        (
            batch.region_id,
            batch.model,
            work_until(
                max(0, batch.lines - done[batch.id].completed - done[batch.id].failed),
                (batch.expires_at - now).total_seconds(),
            ),
        )
        for batch in batches
    ]
