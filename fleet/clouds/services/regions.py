"""Declares cloud regions and reads their stacks and prices. Only the loop `fleet.cloud` calls the cloud, so creating a
region never waits. A region is usable once it is `ready`. A refused stack is read again every minute, because an
operator is fixing it. Later readings add pools and never change what a user may have set. A failed price list loses
only the price, after a week."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import transaction
from django.db.models import Max, Q, QuerySet

from fleet.capacity.planning.pools import Market
from fleet.clouds.aws.calls import CallFailed, Unanswered
from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.aws.region import PoolFound, StackRefused, on_demand_prices, region_read, spot_prices
from fleet.clouds.ecs.region import cluster_read
from fleet.clouds.models import CapacityPool, CloudRegion
from fleet.deployments.selectors import instance_types_wanted
from fleet.machines.models import Machine
from fleet.machines.services.orders import launches_hurry
from fleet.reconcile.planning.states import CloudRegionState, MachineState
from fleet.regions.models import Region
from kernel import wake_ups
from kernel.events import event_record
from kernel.refusals import InvalidInput
from kernel.tones import Tone
from models_registry.instance_types.selectors import instance_shapes
from models_registry.instance_types.services import instance_type_ensure

AWS, ECS = "aws", "ecs"
TEMPLATES = {AWS: "deploy/aws/region.yaml", ECS: "deploy/aws/ecs.yaml"}
"""By provider with a stack."""
STACK = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,127}")
AWS_REGION = re.compile(r"[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}")
CLOUD_COLUMNS = ("stack", "aws_region")

log = logging.getLogger(__name__)


def cloud_columns(name: str, columns: dict[str, Any]) -> dict[str, str]:
    """Removes a cloud region's fields from `columns` and returns them; {} for other providers. Raises InvalidInput if a
    stack is missing, malformed, or given to a provider without stacks."""
    given = {column: columns.pop(column, "") for column in CLOUD_COLUMNS}
    provider = columns.get("provider", "")
    if provider not in TEMPLATES:
        if set_ := [column for column, value in given.items() if value]:
            message = f"only a region of provider {' or '.join(TEMPLATES)} has a {set_[0]}"
            raise InvalidInput(field=set_[0], rule="provider", message=message)
        return {}
    if not STACK.fullmatch(given["stack"]):
        message = f"a region of provider {provider} needs the name of its stack, as of {TEMPLATES[provider]}"
        raise InvalidInput(field="stack", rule="stack", message=message)
    given["aws_region"] = given["aws_region"] or name
    if not AWS_REGION.fullmatch(given["aws_region"]):
        message = f"{given['aws_region']!r} is not a region of AWS, such as us-east-1: set aws_region"
        raise InvalidInput(field="aws_region", rule="aws_region", message=message)
    return given


def cloud_region_add(region: Region, columns: dict[str, str], now: datetime) -> None:
    """Adds the row that requests a reading, in the transaction that creates the region."""
    install_ensure(now)
    CloudRegion.objects.create(region=region, **columns)
    wake_ups.send("fleet.cloud")


def cloud_region_read(cloud: CloudRegion, now: datetime) -> None:
    """Reads a region's stack and stores its outputs, with pools for the types that the fleet names: all shipped types
    in all zones would hide them. Blocks as long as the cloud does."""
    types = sorted(instance_types_wanted())
    try:
        install = install_ensure(now).id
        if cloud.region.provider == ECS:
            read = cluster_read(cloud.aws_region, cloud.stack, install)
        else:
            read = region_read(cloud.aws_region, cloud.stack, install, instance_shapes(types))
    except Unanswered as error:
        log.warning("the stack of region %s was not read: %s", cloud.pk, error)
        CloudRegion.objects.filter(pk=cloud.pk).update(reason=f"no answer yet: {error}")
        return
    except (StackRefused, CallFailed) as error:
        _mark_refused(cloud, str(error), now)
        return
    with transaction.atomic():
        row = CloudRegion.objects.select_for_update().get(pk=cloud.pk)
        was, row.state, row.reason = row.state, CloudRegionState.READY.value, ""
        row.base, row.read_at = _with_images_in_use(row, msgspec.to_builtins(read.base)), now
        row.types_read = types
        row.save(update_fields=["state", "reason", "base", "read_at", "types_read"])
        added = pools_add(row.pk, read.pools)
        if was != CloudRegionState.READY or added:
            many = f"{added} pool{'s' if added != 1 else ''} of capacity"
            _region_event(row, "ready", f"region {row.pk} was read from stack {row.stack}: {many} added", Tone.OK, now)
            for kind in sorted({each.instance_type for each in read.pools}):
                launches_hurry(region=row.pk, instance_type=kind, now=now)
            wake_ups.send("fleet.reconcile")


def cloud_new_types_read(cloud: CloudRegion, now: datetime) -> None:
    """Reads the stack again if the fleet names types that the last reading left out."""
    if instance_types_wanted() - set(cloud.types_read):
        cloud_region_read(cloud, now)


def _with_images_in_use(row: CloudRegion, base: dict[str, Any]) -> dict[str, Any]:
    """A stack names its newest images. Root volumes of the images in use are known from earlier readings."""
    pools = CapacityPool.objects.filter(region_id=row.pk)
    used = {image for pair in pools.values_list("image", "next_image") for image in pair}
    kept = {image: device for image, device in row.base.get("root_devices", {}).items() if image in used}
    return {**base, "root_devices": {**kept, **base["root_devices"]}}


def _mark_refused(cloud: CloudRegion, reason: str, now: datetime) -> None:
    """A ready region stays ready: its machines use the earlier reading."""
    with transaction.atomic():
        row = CloudRegion.objects.select_for_update().get(pk=cloud.pk)
        news = row.reason != reason
        if row.state != CloudRegionState.READY:
            row.state = CloudRegionState.REFUSED.value
        row.reason, row.read_at = reason, now
        row.save(update_fields=["state", "reason", "read_at"])
        if news:
            _region_event(row, "refused", f"region {row.pk} cannot be read: {reason}", Tone.BAD, now)


def _region_event(cloud: CloudRegion, what: str, message: str, tone: Tone, now: datetime) -> None:
    kind = f"region.{what}"
    event_record(kind=kind, message=message, tone=tone, now=now, actor="fleet.cloud", region=cloud.pk, detail={})


def pools_add(region: str, found: Sequence[PoolFound]) -> int:
    """Adds new pools after the existing ones and returns their number. Never changes existing pools. A new pool of a
    type that has pools already gets their image: with a newer one from the stack, cells would mix software."""
    rows = CapacityPool.objects.filter(region_id=region)
    images = {
        kind: (image, next_image)
        for kind, image, next_image in rows.values_list("instance_type_id", "image", "next_image")
    }
    there = set(rows.values_list("instance_type_id", "market", "zone", "reservation"))
    last = dict(rows.values_list("instance_type_id").annotate(Max("position")).order_by())
    added = 0
    for each in found:
        if (each.instance_type, each.market.value, each.zone, each.reservation) in there:
            continue
        instance_type_ensure(each.instance_type)
        last[each.instance_type] = last.get(each.instance_type, -1) + 1
        image, next_image = images.get(each.instance_type, (each.image, ""))
        columns = {**_pool_columns(each), "image": image, "next_image": next_image}
        CapacityPool.objects.create(region_id=region, position=last[each.instance_type], **columns)
        added += 1
    return added


def _pool_columns(found: PoolFound) -> dict[str, Any]:
    return {
        "instance_type_id": found.instance_type, "market": found.market.value, "zone": found.zone,
        "zone_id": found.zone_id, "subnet": found.subnet, "image": found.image, "reservation": found.reservation,
        "placement_group": found.placement_group, "network_nodes": list(found.network_nodes),
        "ends_at": found.ends_at, "free": found.free,
    }  # fmt: skip


RATED = (Market.ON_DEMAND, Market.OPEN, Market.RESERVED)
"""Markets billed as on demand. Capacity Blocks are paid in advance, and no list has the price of interruptible
reservations."""
KEPT = timedelta(days=7)
"""Older prices count as unknown."""


Read = Callable[[Iterable[CapacityPool]], dict[tuple[str, str], float]]


def cloud_prices(cloud: CloudRegion, now: datetime) -> None:
    """Reads the price list. Once a day."""

    def read(pools: Iterable[CapacityPool]) -> dict[tuple[str, str], float]:
        prices = on_demand_prices(cloud.aws_region, sorted({pool.instance_type_id for pool in pools}))
        return {
            (pool.instance_type_id, pool.zone): prices[pool.instance_type_id]
            for pool in pools
            if pool.instance_type_id in prices
        }

    _store_prices(cloud, CapacityPool.objects.filter(region_id=cloud.pk, market__in=RATED), read, now)


def cloud_spot_prices(cloud: CloudRegion, now: datetime) -> None:
    """Reads the spot history if a pool is spot. Once an hour."""

    def read(pools: Iterable[CapacityPool]) -> dict[tuple[str, str], float]:
        return spot_prices(cloud.aws_region, {pool.instance_type_id for pool in pools}, now)

    _store_prices(cloud, CapacityPool.objects.filter(region_id=cloud.pk, market=Market.SPOT), read, now)


def _store_prices(cloud: CloudRegion, rows: "QuerySet[CapacityPool]", read: Read, now: datetime) -> None:
    pools = list(rows)
    if not pools:
        return
    prices: dict[tuple[str, str], float] = {}
    try:
        prices = read(pools)
    except CallFailed as error:
        log.warning("prices of region %s were not read: %s", cloud.pk, error)
    for pool in pools:
        price = prices.get((pool.instance_type_id, pool.zone))
        if price is not None:
            CapacityPool.objects.filter(pk=pool.pk).update(price_per_hour=price, price_at=now)
            _machines_of(pool).filter(Q(price_per_hour=None) | ~Q(price_per_hour=price)).update(price_per_hour=price)
        elif pool.price_at is not None and pool.price_at < now - KEPT:
            CapacityPool.objects.filter(pk=pool.pk).update(price_per_hour=None, price_at=None)
            _machines_of(pool).update(price_per_hour=None)


def _machines_of(pool: CapacityPool) -> "QuerySet[Machine]":
    """Running machines: the price of a terminated one no longer changes."""
    bought = Machine.objects.filter(region_id=pool.region_id, instance_type_id=pool.instance_type_id, zone=pool.zone)
    return bought.filter(market=pool.market).exclude(state=MachineState.GONE)
