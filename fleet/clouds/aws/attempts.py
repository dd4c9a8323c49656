"""Stores launch units, their attempts and the outcomes. Makes no AWS call. Every change of a unit holds its row's lock,
so that two processes cannot write two attempts. The parameters of a call are stored with its attempt before the call: a
repeated call must send the same ones."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.conf import settings

from fleet.agents.selectors import server_pin
from fleet.capacity.planning.pools import (
    LaunchOutcome,
    Market,
    PausePool,
    PoolView,
    Scope,
    UnitView,
    parse_markets,
    pauses,
)
from fleet.capacity.planning.rates import Offer
from fleet.capacity.selectors import machine_prices, pool_views
from fleet.clouds.aws.launch import Boot, LaunchBase, Request, run_instances, user_data
from fleet.clouds.base import Later
from fleet.clouds.models import CapacityPool, CloudRegion, ImageMove, LaunchAttempt, LaunchUnit
from fleet.clouds.planning.launches import (
    WINDOW,
    AttemptView,
    EndAttempt,
    KeepAttempt,
    Launch,
    LaunchCap,
    WriteAttempt,
    cap_refusal,
)
from fleet.clouds.planning.upkeep import ImageState, takes_new
from fleet.clouds.selectors import image_machines, units_under_way
from fleet.machines.models import Machine
from fleet.reconcile.planning.states import MachineRole, MachineState
from kernel import live

PROVIDER = "aws"
CAP_RETRY_S = 3600.0


def unit_view(unit: LaunchUnit, count: int, *, wanted: bool) -> UnitView:
    markets = parse_markets(unit.markets) or frozenset(Market)
    return UnitView(unit.id, unit.region_id, unit.instance_type_id, count, markets, tuple(unit.near), wanted)


def attempt_view(row: LaunchAttempt) -> AttemptView:
    return AttemptView(
        number=row.number,
        token=row.token,
        pool=msgspec.convert(row.pool_seen, PoolView),
        count=len(row.subjects),
        begun_at=row.begun_at,
        called_at=row.called_at,
        outcome=LaunchOutcome(row.outcome) if row.outcome else None,
        again_at=row.again_at,
        ended_at=row.ended_at,
    )


def pools_of(region: str) -> list[PoolView]:
    return [pool.view() for pool in CapacityPool.objects.filter(region_id=region)]


def pools_to_try(region: str, now: datetime) -> list[PoolView]:
    """Returns a region's pools, each with the image of its next launch. Call it in the transaction that writes the
    launch, so that only one of several planned units tries a new image."""
    moves = list(ImageMove.objects.select_for_update().filter(region_id=region, ended_at=None).order_by("pk"))
    new = {
        move.instance_type_id
        for move in moves
        if takes_new(ImageState(move.state), image_machines(move), units_under_way(move))
    }
    rows = list(CapacityPool.objects.filter(region_id=region))
    return [
        replace(view, image=row.next_image) if row.next_image and row.instance_type_id in new else view
        for row, view in zip(rows, pool_views(rows, now), strict=True)
    ]


def attempt_write(
    unit: LaunchUnit, step: WriteAttempt, subjects: Sequence[str], cloud: CloudRegion, install: str, now: datetime
) -> LaunchAttempt:
    """Writes a new attempt, in the transaction that holds the unit's lock. Raises Later if the region's cap is reached.
    Raises ValueError if EC2 cannot launch this."""
    CloudRegion.objects.select_for_update().get(pk=cloud.pk)  # no other process may change the counts below
    price = _price_for_cap(step.pool, now)
    cap = LaunchCap(cloud.machines_cap, cloud.price_cap)
    refusal = cap_refusal(len(subjects), price, _counted_launches(cloud, now), cap, now)
    if refusal is not None:
        wait_s = (refusal.until - now).total_seconds() if refusal.until is not None else CAP_RETRY_S
        raise Later(refusal.reason, wait_s)
    row = LaunchAttempt(
        unit=unit,
        number=step.number,
        pool_id=step.pool.id,
        pool_seen=msgspec.to_builtins(step.pool),
        base=_call_base(unit, cloud, step.pool, install, now),
        token=step.token,
        subjects=list(subjects),
        price_per_hour=price,
        begun_at=now,
        called_at=now,
    )
    request_of(row)
    row.save(force_insert=True)
    LaunchUnit.objects.filter(pk=unit.pk).update(ended_at=None)
    return row


def _counted_launches(cloud: CloudRegion, now: datetime) -> list[Launch]:
    """Launches within the cap's hour, those in doubt included."""
    recent = LaunchAttempt.objects.filter(unit__region_id=cloud.pk, begun_at__gt=now - WINDOW)
    counted = [row for row in recent if row.ended_at is None or row.outcome == LaunchOutcome.LAUNCHED]
    return [Launch(row.begun_at, len(row.subjects), row.price_per_hour) for row in counted]


def _price_for_cap(pool: PoolView, now: datetime) -> float | None:
    """Highest price of a machine for the cap: the current price, or the bid limit for spot. None if it is unknown."""
    offer = Offer(pool.market, pool.price_per_hour)
    stated = machine_prices().of(pool.region, pool.instance_type, now, offer).usd
    return (pool.max_price or stated) if pool.market is Market.SPOT else stated


def _call_base(unit: LaunchUnit, cloud: CloudRegion, pool: PoolView, install: str, now: datetime) -> dict[str, Any]:
    base, is_node = cloud.stated_base(), unit.role == MachineRole.NODE
    launch = LaunchBase(
        install=install,
        security_group=base.node_group if is_node else base.ingress_group,
        instance_profile_arn=base.node_profile if is_node else base.ingress_profile,
        root_device=base.root_device_of(pool.image),
        root_gib=base.root_gib,
    )
    boot = Boot(settings.AGENT_URLS[0], server_pin(now), cloud.aws_region, install, unit.id)
    return {"launch": msgspec.to_builtins(launch), "boot": msgspec.to_builtins(boot)}


def request_of(row: LaunchAttempt) -> Request:
    """Returns the parameters of an attempt's call. They never change. Raises ValueError if EC2 cannot launch this."""
    script = user_data(msgspec.convert(row.base["boot"], Boot))
    unit = unit_view(row.unit, len(row.subjects), wanted=True)
    return run_instances(unit, attempt_view(row), msgspec.convert(row.base["launch"], LaunchBase), script)


def attempt_record(
    row: LaunchAttempt, verdict: EndAttempt | KeepAttempt, text: str, now: datetime, scope: Scope = Scope.POOL
) -> None:
    """Stores an attempt's outcome, in the transaction that holds its unit's lock, and pauses or resumes its pools."""
    row.outcome, row.text = verdict.outcome.value, text
    if isinstance(verdict, KeepAttempt):
        row.again_at = verdict.again_at
    else:
        row.ended_at = now
        pools_pause(row.pool_id, row.unit.region_id, verdict.outcome, text, now, scope)
    row.save(update_fields=["outcome", "text", "again_at", "ended_at"])


def pools_pause(
    pool: int | None, region: str, outcome: LaunchOutcome, text: str, now: datetime, scope: Scope = Scope.POOL
) -> None:
    """Pauses the pools that a launch outcome concerns. `pool` is None if the pool was removed in the meantime."""
    if pool is None:
        return
    list(CapacityPool.objects.select_for_update().filter(region_id=region).order_by("pk"))
    for change in pauses(outcome, scope, text, pool, pools_of(region), now):
        columns: dict[str, Any] = {"failures": 0, "paused_until": None, "pause_reason": ""}
        if isinstance(change, PausePool):
            columns = {"failures": change.failures, "paused_until": change.until, "pause_reason": change.reason}
        CapacityPool.objects.filter(pk=change.pool).update(**columns)


def machines_record(row: LaunchAttempt, instances: Sequence[dict[str, Any]], now: datetime) -> None:
    """Stores the machines of a launch, each with the subject at its index, in the transaction that ends the attempt."""
    pool, ours = msgspec.convert(row.pool_seen, PoolView), row.unit
    for instance in instances:
        index = int(instance.get("AmiLaunchIndex", 0))
        if index >= len(row.subjects):
            continue  # garbage collection terminates it
        subject = str(row.subjects[index])
        Machine.objects.get_or_create(
            provider=PROVIDER,
            provider_id=instance["InstanceId"],
            defaults={
                "id": machine_id(subject),
                "region_id": ours.region_id,
                "role": ours.role,
                "state": MachineState.TAKEN.value,
                "reason": f"it is {subject}",
                "runs": subject,
                "address": instance.get("PrivateIpAddress", ""),
                "instance_type_id": ours.instance_type_id,
                "type_stated": True,
                "launched_by": row,
                "zone": pool.zone,
                "market": pool.market.value,
                "image": pool.image,
                "reservation": instance.get("CapacityReservationId", pool.reservation),
                "price_per_hour": pool.price_per_hour,
                "cloud_state": instance["State"]["Name"],
                "cloud_seen_at": now,
                "created_at": now,
                "state_since": now,
            },
        )
    live.push("machines")


def machine_id(subject: str) -> str:
    """The digits of its node, if free. Hosts that join get an ID from a nonce."""
    name = f"m-{subject.removeprefix('n-')}"
    taken = not subject.startswith("n-") or Machine.objects.filter(id=name).exists()
    return f"m-{secrets.token_hex(4)}" if taken else name


def unit_close(unit: LaunchUnit, reason: str, now: datetime) -> None:
    unit.ended_at, unit.reason = now, reason
    unit.save(update_fields=["ended_at", "reason"])


def until_s(moment: datetime, now: datetime) -> float:
    """Returns the seconds from `now` until `moment`, at least 0."""
    return max(0.0, (moment - now) / timedelta(seconds=1))
