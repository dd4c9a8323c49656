"""Sets what tokens of a deployment cost from a time on. The list only grows: what was charged is never charged anew."""

from datetime import datetime
from decimal import Decimal

from django.db import transaction

from fleet.models import Deployment
from kernel import live
from kernel.dated_rows import dated_row_add, dated_row_withdraw
from kernel.events import event_record
from kernel.refusals import InvalidInput
from kernel.tones import Tone
from traffic.models import TokenPrice


@transaction.atomic
def price_set(
    *,
    deployment: str,
    prompt: Decimal,
    completion: Decimal,
    actor: str,
    now: datetime,
    cached: Decimal | None = None,
    valid_from: datetime | None = None,
) -> TokenPrice:
    """A price for a million tokens in US dollars, from `valid_from` (now) on; `cached` None: as other prompt tokens.

    Raises:
        InvalidInput: an unknown deployment, or a time that has passed: tokens are charged when they are counted.
        Conflict: there is a price from that very time on.
    """
    if not Deployment.objects.filter(name=deployment).exists():
        there = ", ".join(Deployment.objects.order_by("name").values_list("name", flat=True)) or "none"
        message = f"there is no deployment {deployment!r}; there are: {there}"
        raise InvalidInput(field="deployment", rule="exists", message=message)
    row = TokenPrice(
        deployment=deployment,
        valid_from=valid_from or now,
        prompt=prompt,
        cached=prompt if cached is None else cached,
        completion=completion,
        actor=actor[:64],
        created_at=now,
    )
    there_is = f"{deployment} has a price from {row.valid_from:%Y-%m-%d %H:%M:%S} UTC on already"
    dated_row_add(row, now=now, counted="what was counted until now was charged", conflict=there_is)
    _event("set", row, actor, now)
    return row


@transaction.atomic
def price_withdraw(*, price_id: int, actor: str, now: datetime) -> None:
    """Take back a price that is not in force yet.

    Raises:
        Conflict: tokens may have been charged by it.
    """
    _event("withdrawn", dated_row_withdraw(TokenPrice, price_id, now=now), actor, now)


def _event(what: str, row: TokenPrice, actor: str, now: datetime) -> None:
    amounts = f"prompt {row.prompt:f}, cached {row.cached:f}, completion {row.completion:f} USD per million tokens"
    event_record(
        kind=f"price.{what}",
        message=f"price of {row.deployment} from {row.valid_from:%Y-%m-%d %H:%M} UTC {what}: {amounts}, by {actor}",
        tone=Tone.WARN,
        now=now,
        actor=actor[:64],
        deployment=row.deployment,
        detail={"prompt": str(row.prompt), "cached": str(row.cached), "completion": str(row.completion)},
    )
    live.push("usage")
