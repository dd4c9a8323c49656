"""Pools of capacity as rows: in the order in which they are tried, and those of a state."""

from datetime import datetime

from django.db.models import Q, QuerySet

from fleet.models import CapacityPool
from fleet.planning.pools import RESERVATIONS, SETTINGS
from fleet.planning.states import PoolState


def pools_in_order(region: str = "") -> QuerySet[CapacityPool]:
    """Of all regions, or of one."""
    pools = CapacityPool.objects.order_by("region_id", "instance_type_id", "position")
    return pools.filter(region_id=region) if region else pools


def is_in_state(state: PoolState, now: datetime) -> Q:
    """`fleet.planning.pools.pool_state` in SQL."""
    off, ended = Q(enabled=False), Q(ends_at__lte=now + SETTINGS.useful)
    resting, full = Q(paused_until__gt=now), Q(market__in=RESERVATIONS, free=0)
    return {
        PoolState.OFF: off,
        PoolState.ENDED: ended & ~off,
        PoolState.RESTING: resting & ~off & ~ended,
        PoolState.FULL: full & ~off & ~ended & ~resting,
        PoolState.USABLE: ~off & ~ended & ~resting & ~full,
    }[state]
