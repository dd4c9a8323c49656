"""What a million more tokens of batches would cost, beside what they cost on average. Pure.

Machines that run anyway cost the same whatever batches do on them. So hours are compared: what cells cost in an hour is
taken for a + b x tokens of other classes + c x tokens of batches, none below 0, and c is the marginal price: nothing
where as many cells run at night as without batches, more where cells are kept, or added, for them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from traffic.planning.least_squares import solve, weighed

HOURS_LEAST = 24
BATCH_HOURS_LEAST = 6
"""With batches, and as many without or with other amounts of them: fewer tell nothing."""
ERROR_MOST = 0.5
"""Of what cells cost for a token on average, the standard error of the marginal price."""
TERMS = 3


@dataclass(frozen=True, slots=True)
class BatchHour:
    """An hour that is over. `amount`: what cells cost or took in it, idle time included."""

    amount: float
    other_tokens: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class MarginalPrice:
    """For a million tokens, with its standard error, out of so many hours."""

    value: Decimal
    error: Decimal
    hours: int


def marginal_price(hours: Iterable[BatchHour]) -> MarginalPrice | None:
    """None: too few hours, or they are too much alike to tell."""
    known = [hour for hour in hours if hour.amount > 0]
    with_batches = sum(hour.batch_tokens > 0 for hour in known)
    if len(known) < HOURS_LEAST or with_batches < BATCH_HOURS_LEAST:
        return None
    products, targets, square = [0.0] * 6, [0.0] * TERMS, 0.0
    for hour in known:
        of_products, of_targets = weighed((1.0, hour.other_tokens / 1e6, hour.batch_tokens / 1e6), hour.amount)
        products = [one + more for one, more in zip(products, of_products, strict=True)]
        targets = [one + more for one, more in zip(targets, of_targets, strict=True)]
        square += hour.amount
    best = solve(products, targets, square, TERMS)
    if best is None:
        return None
    value, error = best.value(2), best.error_of((0.0, 0.0, 1.0), len(known))
    average = square / sum((hour.other_tokens + hour.batch_tokens) / 1e6 for hour in known)
    if error > ERROR_MOST * average or (2 not in best.terms and not _told_apart(known)):
        return None
    return MarginalPrice(Decimal(repr(round(value, 6))), Decimal(repr(round(error, 6))), len(known))


def _told_apart(hours: list[BatchHour]) -> bool:
    """Whether amounts of batches differ, and not as those of the others do: else nothing says that they are free."""
    ratios = {round(hour.batch_tokens / (hour.other_tokens + 1), 3) for hour in hours}
    return len({hour.batch_tokens for hour in hours}) > 1 and len(ratios) > 1
