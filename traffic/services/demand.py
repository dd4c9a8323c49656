"""Measures the demand of each series, and writes the mean of each slot once it is over. Looks read what ingresses and
cells have reported anyway; what was seen of the slot so far is in this process, so a planner that is killed in its
middle leaves a hole."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connection

from fleet.models import Deployment
from fleet.planning.forecast.series import HISTORY_SLOT_S, SeriesKey
from kernel import wake_ups
from kernel.leases import lease_take, this_holder
from traffic.models import DemandDay
from traffic.planning.demand import Place, PoolLook, SlotMeans, origin_loads, series_loads, slot_of
from traffic.selectors.demand import FRESH_FOR, in_cells_by_class
from traffic.selectors.steering import IngressView, ingress_views

LEASE = "traffic:demand"
LEASE_S = 20.0
"""After this another planner may measure; a look takes tens of milliseconds, and there is one every 5 s."""
DAYS_KEPT = timedelta(days=36)
"""Five weeks and the day that is not over."""
SLOTS_A_DAY = 86_400 // HISTORY_SLOT_S
_WRITE = """
    INSERT INTO traffic_demandday (deployment_id, origin_id, serving_class, day, loads)
    SELECT seen.deployment, seen.origin, seen.class, %(day)s,
        array_fill(NULL::float8, ARRAY[%(number)s - 1]) || seen.load
    FROM unnest(%(deployments)s::text[], %(origins)s::text[], %(classes)s::text[], %(loads)s::float8[])
        AS seen(deployment, origin, class, load)
    JOIN fleet_deployment ON fleet_deployment.name = seen.deployment
    JOIN fleet_region ON fleet_region.name = seen.origin
    ON CONFLICT (deployment_id, origin_id, serving_class, day)
    DO UPDATE SET loads[%(number)s] = EXCLUDED.loads[%(number)s]
"""


@dataclass(frozen=True, slots=True)
class _Look:
    """What is known now, by deployment: its pools in the regions that have all reported, and its loads."""

    pools: Mapping[str, Mapping[str, PoolLook]]
    loads: Mapping[SeriesKey, float]

    @property
    def places(self) -> list[Place]:
        return [(deployment, region) for deployment, regions in self.pools.items() for region in regions]


class DemandMeter:
    """The measuring of one planner. Of several one measures at a time."""

    def __init__(self) -> None:
        self._open: SlotMeans | None = None
        self._before: Mapping[str, Mapping[str, PoolLook]] = {}

    def look(self, *, now: datetime) -> int:
        """Take a look. Returns how many series got the mean of a slot that ended."""
        if lease_take(name=LEASE, holder=this_holder(), ttl_s=LEASE_S, now=now) is None:
            self._open = None
            return 0
        index, written = slot_of(now.timestamp()), 0
        if self._open is not None and self._open.index != index:
            ended, self._open = self._open, None
            if ended.index == index - 1:
                written = slot_write(ended)
        seen = _look(self._before, now)
        self._open, self._before = self._open or SlotMeans(index), seen.pools
        self._open.add(now.timestamp(), seen.places, seen.loads)
        return written


def slot_write(slot: SlotMeans) -> int:
    """Write the means of a slot, of all series in one statement. Returns how many there are."""
    starts_at = datetime.fromtimestamp(slot.index * HISTORY_SLOT_S, UTC)
    days = DemandDay.objects.filter(day__gte=(starts_at - timedelta(days=1)).date())
    known = {SeriesKey(*row) for row in days.values_list("deployment_id", "origin_id", "serving_class")}
    means = sorted(slot.means(known).items())
    if not means:
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            _WRITE,
            {
                "day": starts_at.date(),
                "number": slot.index % SLOTS_A_DAY + 1,
                "deployments": [key.deployment for key, _ in means],
                "origins": [key.origin for key, _ in means],
                "classes": [key.serving_class for key, _ in means],
                "loads": [load for _, load in means],
            },
        )
    wake_ups.send("traffic.plan")
    return len(means)


def demand_trim(*, now: datetime) -> None:
    """Forget days that no forecast looks at."""
    DemandDay.objects.filter(day__lt=(now - DAYS_KEPT).date()).delete()


def _look(before: Mapping[str, Mapping[str, PoolLook]], now: datetime) -> _Look:
    views, in_cells = ingress_views(), in_cells_by_class(now)
    pools: dict[str, dict[str, PoolLook]] = {}
    loads: dict[SeriesKey, float] = {}
    for name, own_class in Deployment.objects.values_list("name", "serving_class"):
        pools[name] = {region: pool for region, there in views.items() if (pool := _pool(there, name, now)) is not None}
        origins = origin_loads(pools[name], before.get(name, {}))
        loads |= series_loads(name, own_class, origins, in_cells)
    return _Look(pools, loads)


def _pool(ingresses: list[IngressView], deployment: str, now: datetime) -> PoolLook | None:
    """None: one of the region's ingresses has not reported lately, or not of this deployment."""
    whole = PoolLook(0.0)
    for ingress in ingresses:
        row = ingress.telemetry.get("pools", {}).get(deployment)
        if row is None or ingress.seen_at is None or now - ingress.seen_at > FRESH_FOR:
            return None
        # HAProxy's sessions of a backend: those with a server and those that wait for one.
        whole += PoolLook(row.get("in_flight", 0), row.get("spilled_in_flight", 0), row.get("spilled_to", {}))
    return whole
