"""What a person may say of pools of capacity: switch one off, put it earlier or later, add one of a market that no
reading finds, have a resting one tried again. Orders that wait for a machine of its type are tried at once.

What the reading of a stack found stays: the next one would find it again. It adds pools and changes none, so what is
said here outlives it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F

from fleet.models import CapacityPool, CloudRegion, InstanceType
from fleet.planning.markets import Market
from fleet.planning.pools import DECLARABLE, moved
from fleet.planning.states import CloudRegionState
from fleet.providers.aws.launch import usage_class
from fleet.services.provider_call import launches_hurry
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

ASIDE = 1_000_000
"""Positions out of the way while those of a type are given anew: no two pools of it may have one, at any time."""


@dataclass(frozen=True, slots=True)
class NewPool:
    """A pool as a person declares it: last of its type, or at `position`. `max_price`: US dollars an hour for a
    machine, of spot; None: the price on demand."""

    region: str
    instance_type: str
    zone: str
    market: Market = Market.SPOT
    max_price: float | None = None
    position: int | None = None


def pool_declare(new: NewPool, *, actor: str, now: datetime, why: str = "") -> CapacityPool:
    """Add a pool of a market in `DECLARABLE`, with the subnet and image of the type's other pools in that zone.

    Raises:
        InvalidInput: no such region of a cloud, type or zone; the type is not sold so; a price of another market.
        Conflict: the pool is there already, or the region's stack has not been read.
    """
    _check_market(new.market, new.instance_type)
    _check_price(new.market, new.max_price)
    with transaction.atomic():
        _check_region(new.region)
        pools = _pools_locked(new.region, new.instance_type)
        like = _like(pools, new)
        if any((pool.market, pool.zone) == (new.market.value, new.zone) for pool in pools):
            raise Conflict(f"{new.region} has a pool of {new.instance_type}, {new.market} in {new.zone}, already")
        pool = CapacityPool.objects.create(
            region_id=new.region,
            instance_type_id=new.instance_type,
            position=max(pool.position for pool in pools) + 1,
            market=new.market.value,
            zone=new.zone,
            zone_id=like.zone_id,
            subnet=like.subnet,
            image=like.image,
            next_image=like.next_image,
            max_price=new.max_price,
            declared_by=actor,
        )
        if new.position is not None:
            _reorder([*pools, pool], pool, new.position)
        _note(pool, "declared", actor, now, why, {"max_price": new.max_price, "position": new.position})
    return pool


def pool_change(*, pool_id: int, columns: Mapping[str, Any], actor: str, now: datetime, why: str = "") -> CapacityPool:
    """Change what is given of `enabled`, `position` (0: the first of its type that is tried) and `max_price`. What is
    so already is no change.

    Raises:
        InvalidInput: a price of another market than spot.
    """
    with transaction.atomic():
        row = CapacityPool.objects.get(pk=pool_id)
        pools = _pools_locked(row.region_id, row.instance_type_id)
        pool = next(one for one in pools if one.pk == pool_id)
        if "max_price" in columns:
            _check_price(Market(pool.market), columns["max_price"])
        wanted = {name: columns[name] for name in ("enabled", "max_price") if name in columns}
        changed = {name: value for name, value in wanted.items() if getattr(pool, name) != value}
        for name, value in changed.items():
            setattr(pool, name, value)
        if changed:
            pool.save(update_fields=list(changed))
        if "position" in columns and _reorder(pools, pool, columns["position"]):
            changed["position"] = columns["position"]
        if changed:
            _note(pool, _said(changed), actor, now, why, changed)
    return pool


def pool_resume(*, pool_id: int, actor: str, now: datetime, why: str = "") -> CapacityPool:
    """Let a resting pool be tried again at once; its failures are forgotten. One that does not rest stays as it is."""
    with transaction.atomic():
        pool = CapacityPool.objects.select_for_update().get(pk=pool_id)
        if pool.paused_until is None and not pool.failures:
            return pool
        rested = {"paused_until": pool.paused_until and pool.paused_until.isoformat(), "reason": pool.pause_reason}
        pool.paused_until, pool.pause_reason, pool.failures = None, "", 0
        pool.save(update_fields=["paused_until", "pause_reason", "failures"])
        _note(pool, "resumed", actor, now, why, rested)
    return pool


def pool_delete(*, pool_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Take back a pool that a person declared. Machines of it stay.

    Raises:
        Conflict: the reading of the stack found it.
    """
    with transaction.atomic():
        pool = CapacityPool.objects.select_for_update().get(pk=pool_id)
        if not pool.declared_by:
            message = "was found by the reading of the region's stack, and the next one would find it again"
            raise Conflict(f"{pool} {message}: switch it off instead")
        _note(pool, "removed", actor, now, why, {})
        pool.delete()


def _pools_locked(region: str, instance_type: str) -> list[CapacityPool]:
    pools = CapacityPool.objects.select_for_update().filter(region_id=region, instance_type_id=instance_type)
    return list(pools.order_by("position"))


def _check_region(region: str) -> None:
    cloud = CloudRegion.objects.select_for_update().filter(region_id=region).first()
    if cloud is None:
        message = f"there is no region {region!r} in a cloud; pools are of regions with provider aws"
        raise InvalidInput(field="region", rule="exists", message=message)
    if cloud.state != CloudRegionState.READY:
        raise Conflict(f"region {region} is {cloud.state}: a pool takes its subnet and image from what its stack has")


def _like(pools: Sequence[CapacityPool], new: NewPool) -> CapacityPool:
    """A pool of the type in the zone: so the zone offers the type."""
    region, instance_type, zone = new.region, new.instance_type, new.zone
    if not pools:
        there = InstanceType.objects.filter(pools__region_id=region).distinct().values_list("name", flat=True)
        message = f"{region} has no {instance_type!r}; it has {', '.join(sorted(there)) or 'no type yet'}"
        raise InvalidInput(field="instance_type", rule="exists", message=message)
    found = next((pool for pool in pools if pool.zone == zone), None)
    if found is None:
        zones = ", ".join(sorted({pool.zone for pool in pools}))
        message = f"no zone {zone!r} of {region} offers {instance_type}; these do: {zones}"
        raise InvalidInput(field="zone", rule="exists", message=message)
    return found


def _check_market(market: Market, instance_type: str) -> None:
    if market not in DECLARABLE:
        message = f"a pool of market {market} is found by the reading of the region's stack; a person adds"
        raise InvalidInput(field="market", rule="declarable", message=f"{message} {' or '.join(DECLARABLE)}")
    try:
        usage_class(instance_type, market)
    except ValueError as error:
        raise InvalidInput(field="instance_type", rule="sold", message=str(error)) from None


def _check_price(market: Market, max_price: float | None) -> None:
    if max_price is not None and market is not Market.SPOT:
        message = f"only a spot pool has a highest price, and this one is {market}"
        raise InvalidInput(field="max_price", rule="market", message=message)


def _reorder(pools: Sequence[CapacityPool], pool: CapacityPool, position: int) -> bool:
    """Give the pools of a type their positions anew, from 0; whether that changed which one is tried first."""
    was = [one.pk for one in pools]
    wanted = list(moved(was, pool.pk, position))
    if wanted == was:
        return False
    rows = CapacityPool.objects.filter(pk__in=was)
    rows.update(position=F("position") + ASIDE)
    for place, one in enumerate(wanted):
        CapacityPool.objects.filter(pk=one).update(position=place)
    pool.refresh_from_db(fields=["position"])
    return True


def _said(changed: Mapping[str, Any]) -> str:
    """What changed, as an event says it."""
    parts = []
    if "enabled" in changed:
        parts.append("switched on" if changed["enabled"] else "switched off")
    if "position" in changed:
        parts.append(f"moved to place {changed['position']}")
    if "max_price" in changed:
        price = changed["max_price"]
        parts.append(f"given the highest price {price} $/h" if price is not None else "given the price on demand")
    return " and ".join(parts)


def _note(pool: CapacityPool, what: str, actor: str, now: datetime, why: str, detail: Mapping[str, Any]) -> None:
    event_record(
        kind="region.pool",
        message=f"pool of {pool} was {what} by {actor}" + (f": {why}" if why else ""),
        tone=Tone.MOVING,
        now=now,
        actor=actor,
        region=pool.region_id,
        detail={"pool": pool.pk, "instance_type": pool.instance_type_id, "zone": pool.zone, **detail},
    )
    live.push("regions", pool.region_id)
    launches_hurry(region=pool.region_id, instance_type=pool.instance_type_id, now=now)
