"""States what machines cost and draw, what power emits and what tokens cost, from a time on. The list only grows: costs
and charges that were counted never change."""

from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

from django.db import IntegrityError, models, transaction

from fleet.models import Deployment, InstanceType, Rate, Region
from fleet.planning.markets import Market
from fleet.planning.rate import LEAST, MOST, OF_MACHINES, OF_TOKENS, RateKind
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone

R = TypeVar("R", bound=models.Model)


def dated_row_add(row: Any, *, now: datetime, counted: str, conflict: str) -> None:
    """Write a new row, with its `valid_from`. Part of the caller's transaction. `counted`: what was, until now;
    `conflict`: what there is already, where there is a row from that very time on.

    Raises:
        InvalidInput: a time that has passed.
        Conflict: there is one.
    """
    if row.valid_from < now:
        raise InvalidInput(field="valid_from", rule="future", message=f"must not be in the past: {counted} already")
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(conflict) from error


def dated_row_withdraw(model: type[R], pk: int, *, now: datetime) -> R:
    """Take back a row that does not hold yet; returns what it was. Part of the caller's transaction.

    Raises:
        Conflict: something may have been counted by it.
    """
    row: Any = model._default_manager.select_for_update().get(pk=pk)
    if row.valid_from <= now:
        raise Conflict(f"the {row} was in force; set another one instead")
    row.delete()
    return row  # type: ignore[no-any-return]


def dated_states(rows: Iterable[Any], of: Callable[[Any], object], now: datetime) -> dict[int, str]:
    """Row -> `in force`, `later` or `past`. `of`: what a row is about; the latest that has begun is in force of it."""
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
    """A rate from `valid_from` (now) on; see `RateKind`. `region`: of a machine, there only. `market`: of a machine's
    price, of those that are bought so only.

    Raises:
        InvalidInput: an unknown subject, a value out of bounds, or a time that has passed.
        Conflict: there is a rate of the same from that very time on.
    """
    _check(kind, subject, region, value)
    _check_market(kind, market)
    row = Rate(
        kind=kind.value, subject=subject, region=region, market=market, value=value, valid_from=valid_from or now,
        actor=actor[:64], created_at=now,
    )  # fmt: skip
    dated_row_add(row, now=now, counted="what was used until now was counted", conflict=f"there is a {row} already")
    _event("set", row, actor, now)
    return row


@transaction.atomic
def rate_withdraw(*, rate_id: int, actor: str, now: datetime) -> None:
    """Withdraw a rate that is not in force yet.

    Raises:
        Conflict: something may have been counted by it.
    """
    _event("withdrawn", dated_row_withdraw(Rate, rate_id, now=now), actor, now)


def _check(kind: RateKind, subject: str, region: str, value: Decimal) -> None:
    is_of_machines = kind in OF_MACHINES
    _check_name("subject", subject, InstanceType if is_of_machines else Deployment if kind in OF_TOKENS else Region)
    if region:
        if not is_of_machines:
            message = f"{kind.value} is not a machine's: leave it out"
            raise InvalidInput(field="region", rule="of_machines", message=message)
        _check_name("region", region, Region)
    least, most = LEAST.get(kind, Decimal(0)), MOST[kind]
    if not least <= value <= most:
        message = f"{kind.value} is from {least} to {most}, not {value:f}"
        raise InvalidInput(field="value", rule="range", message=message)


def _check_market(kind: RateKind, market: str) -> None:
    if market and kind is not RateKind.MACHINE_PRICE:
        message = f"{kind.value} is the same however a machine is bought: leave it out"
        raise InvalidInput(field="market", rule="of_prices", message=message)
    if market and market not in set(Market):
        message = f"there is no market {market!r}; there are: {', '.join(Market)}"
        raise InvalidInput(field="market", rule="exists", message=message)


def _check_name(field: str, name: str, model: type[InstanceType | Region | Deployment]) -> None:
    if not model.objects.filter(name=name).exists():
        there = ", ".join(model.objects.order_by("name").values_list("name", flat=True)) or "none"
        what = model._meta.verbose_name
        raise InvalidInput(field=field, rule="exists", message=f"there is no {what} {name!r}; there are: {there}")


def _event(what: str, row: Rate, actor: str, now: datetime) -> None:
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
