"""Sets rates and changes pools of capacity for users. Rates apply from a time on and are never changed afterwards,
because usage was billed by them. Pools can be disabled, reordered, declared or resumed; waiting orders for the type are
then tried immediately. Pools of a stack cannot be removed, because the next reading would find them again; readings
change no existing pool."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

from django.db import IntegrityError, models, transaction
from django.db.models import F

from fleet.capacity.planning.pools import DECLARABLE, Market, moved
from fleet.capacity.planning.rates import LEAST, MOST, OF_MACHINES, OF_TOKENS, RateKind
from fleet.clouds.aws.launch import usage_class
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.deployments.models import Deployment
from fleet.machines.services.orders import launches_hurry
from fleet.reconcile.planning.states import CloudRegionState
from fleet.regions.models import Rate, Region
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.instance_types.models import InstanceType
from models_registry.instance_types.services import instance_type_named

R = TypeVar("R", bound=models.Model)


def dated_row_add(row: Any, *, now: datetime, counted: str, conflict: str) -> None:
    """Adds a row with its `valid_from`, in the caller's transaction. `counted` and `conflict`: parts of the errors.
    Raises InvalidInput if the time has passed. Raises Conflict if a row begins at exactly that time."""
    if row.valid_from < now:
        raise InvalidInput(field="valid_from", rule="future", message=f"must not be in the past: {counted} already")
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(conflict) from error


def dated_row_withdraw(model: type[R], pk: int, *, now: datetime) -> R:
    """Deletes and returns a row that is not valid yet, in the caller's transaction. Raises Conflict if it was valid
    already."""
    row: Any = model._default_manager.select_for_update().get(pk=pk)
    if row.valid_from <= now:
        raise Conflict(f"the {row} was in force; set another one instead")
    row.delete()
    return row  # type: ignore[no-any-return]


def dated_states(rows: Iterable[Any], of: Callable[[Any], object], now: datetime) -> dict[int, str]:
    """Row to `in force`, `later` or `past`. `of`: a row's subject; of each subject the latest that has begun is in
    force."""
    found: dict[int, str] = {}
    current: dict[object, int] = {}
    for row in sorted(rows, key=lambda row: row.valid_from):
        found[row.pk] = "later"
        if row.valid_from <= now:
            found[current.get(of(row), row.pk)] = "past"
            found[row.pk], current[of(row)] = "in force", row.pk
    return found


@transaction.atomic
def rate_set(
    *,
    kind: RateKind,
    subject: str,
    value: Decimal,
    actor: str,
    now: datetime,
    region: str = "",
    market: str = "",
    valid_from: datetime | None = None,
) -> Rate:
    """Sets a rate from `valid_from` (default: now) on; see `RateKind`. `region`: only machines there. `market`: only
    prices of machines bought so. Raises InvalidInput for an unknown subject, a value out of bounds, or a time that has
    passed. Raises Conflict if a rate of the same subject begins at exactly that time."""
    _check_rate(kind, subject, region, value)
    _check_rate_market(kind, market)
    row = Rate(
        kind=kind.value, subject=subject, region=region, market=market, value=value, valid_from=valid_from or now,
        actor=actor[:64], created_at=now,
    )  # fmt: skip
    dated_row_add(row, now=now, counted="what was used until now was counted", conflict=f"there is a {row} already")
    _rate_event("set", row, actor, now)
    return row


@transaction.atomic
def rate_withdraw(*, rate_id: int, actor: str, now: datetime) -> None:
    """Withdraws a rate that is not in force yet. Raises Conflict if it was in force already."""
    _rate_event("withdrawn", dated_row_withdraw(Rate, rate_id, now=now), actor, now)


def _check_rate(kind: RateKind, subject: str, region: str, value: Decimal) -> None:
    is_of_machines = kind in OF_MACHINES
    if is_of_machines:
        instance_type_named(subject, field="subject")
    else:
        _check_name("subject", subject, Deployment if kind in OF_TOKENS else Region)
    if region:
        if not is_of_machines:
            message = f"{kind.value} is not of machines: omit it"
            raise InvalidInput(field="region", rule="of_machines", message=message)
        _check_name("region", region, Region)
    least, most = LEAST.get(kind, Decimal(0)), MOST[kind]
    if not least <= value <= most:
        message = f"{kind.value} is from {least} to {most}, not {value:f}"
        raise InvalidInput(field="value", rule="range", message=message)


def _check_rate_market(kind: RateKind, market: str) -> None:
    if market and kind is not RateKind.MACHINE_PRICE:
        message = f"{kind.value} is the same in all markets: omit it"
        raise InvalidInput(field="market", rule="of_prices", message=message)
    if market and market not in set(Market):
        message = f"there is no market {market!r}; there are: {', '.join(Market)}"
        raise InvalidInput(field="market", rule="exists", message=message)


def _check_name(field: str, name: str, model: type[Region | Deployment]) -> None:
    if not model.objects.filter(name=name).exists():
        there = ", ".join(model.objects.order_by("name").values_list("name", flat=True)) or "none"
        what = model._meta.verbose_name
        raise InvalidInput(field=field, rule="exists", message=f"there is no {what} {name!r}; there are: {there}")


def _rate_event(what: str, row: Rate, actor: str, now: datetime) -> None:
    event_record(
        kind=f"rate.{what}",
        message=f"{row} UTC {what}: {row.value:f}, by {actor}",
        tone=Tone.WARN,
        now=now,
        actor=actor[:64],
        deployment=row.subject if row.kind in OF_TOKENS else "",
        detail={
            "kind": row.kind,
            "subject": row.subject,
            "region": row.region,
            "market": row.market,
            "value": str(row.value),
        },
    )
    live.push("usage")


ASIDE = 1_000_000
"""Temporary positions while a type's pools are renumbered, because positions are unique at all times."""


@dataclass(frozen=True, slots=True)
class NewPool:
    """A pool declared by a user: last of its type, or at `position`. `max_price`: US dollars an hour, for spot; None:
    the on-demand price."""

    region: str
    instance_type: str
    zone: str
    market: Market = Market.SPOT
    max_price: float | None = None
    position: int | None = None


def pool_declare(new: NewPool, *, actor: str, now: datetime, why: str = "") -> CapacityPool:
    """Adds a pool of a market in `DECLARABLE`, with the subnet and image of the type's other pools in that zone. Raises
    InvalidInput if there is no such cloud region, type or zone, if the type is not sold so, or for a price in another
    market. Raises Conflict if the pool exists already, or the region's stack was not read yet."""
    _check_market(new.market, new.instance_type)
    _check_price(new.market, new.max_price)
    with transaction.atomic():
        _check_region(new.region)
        pools = _pools_locked(new.region, new.instance_type)
        like = _sibling_pool(pools, new)
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
        _pool_event(pool, "declared", actor, now, why, {"max_price": new.max_price, "position": new.position})
    return pool


def pool_change(*, pool_id: int, columns: Mapping[str, Any], actor: str, now: datetime, why: str = "") -> CapacityPool:
    """Changes `enabled`, `position` (0: first of its type) and `max_price`, if given. Unchanged values have no effect.
    Raises InvalidInput for a price in another market than spot."""
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
            _pool_event(pool, _change_text(changed), actor, now, why, changed)
    return pool


def pool_resume(*, pool_id: int, actor: str, now: datetime, why: str = "") -> CapacityPool:
    """Ends a pool's pause and resets its failures. Other pools stay unchanged."""
    with transaction.atomic():
        pool = CapacityPool.objects.select_for_update().get(pk=pool_id)
        if pool.paused_until is None and not pool.failures:
            return pool
        rested = {"paused_until": pool.paused_until and pool.paused_until.isoformat(), "reason": pool.pause_reason}
        pool.paused_until, pool.pause_reason, pool.failures = None, "", 0
        pool.save(update_fields=["paused_until", "pause_reason", "failures"])
        _pool_event(pool, "resumed", actor, now, why, rested)
    return pool


def pool_delete(*, pool_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Deletes a pool that a user declared. Its machines stay. Raises Conflict if it is a pool of the stack."""
    with transaction.atomic():
        pool = CapacityPool.objects.select_for_update().get(pk=pool_id)
        if not pool.declared_by:
            message = "comes from the region's stack, and the next reading would add it again"
            raise Conflict(f"{pool} {message}: disable it instead")
        _pool_event(pool, "removed", actor, now, why, {})
        pool.delete()


def _pools_locked(region: str, instance_type: str) -> list[CapacityPool]:
    pools = CapacityPool.objects.select_for_update().filter(region_id=region, instance_type_id=instance_type)
    return list(pools.order_by("position"))


def _check_region(region: str) -> None:
    cloud = CloudRegion.objects.select_for_update().filter(region_id=region).first()
    if cloud is None:
        message = f"there is no region {region!r} in a cloud; only regions of provider aws have pools"
        raise InvalidInput(field="region", rule="exists", message=message)
    if cloud.state != CloudRegionState.READY:
        raise Conflict(f"region {region} is {cloud.state}: pools take subnet and image from its stack")


def _sibling_pool(pools: Sequence[CapacityPool], new: NewPool) -> CapacityPool:
    """An existing pool of the type in the zone, which proves that the zone offers it."""
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
        message = f"a pool of market {market} comes from the region's stack; users declare"
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
    """Renumbers a type's pools from 0. Returns whether the first one changed."""
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


def _change_text(changed: Mapping[str, Any]) -> str:
    parts = []
    if "enabled" in changed:
        parts.append("switched on" if changed["enabled"] else "switched off")
    if "position" in changed:
        parts.append(f"moved to place {changed['position']}")
    if "max_price" in changed:
        price = changed["max_price"]
        parts.append(f"given the highest price {price} $/h" if price is not None else "given the price on demand")
    return " and ".join(parts)


def _pool_event(pool: CapacityPool, what: str, actor: str, now: datetime, why: str, detail: Mapping[str, Any]) -> None:
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
