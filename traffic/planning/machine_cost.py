"""What cells cost by the time of their machines, and whose that is. Pure, and conserved: what an hour of a deployment
cost is exactly what its accounts and idle time get, to the millionth of a dollar.

A cell with requests in flight, as ingresses see it, is busy; the rest of its time is idle. The busy part of an hour
falls to accounts by their share of the tokens that were counted in it, all of an hour without tokens to idle time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Generic, TypeVar

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
MICRO = Decimal("0.000001")
MOST_GAP = timedelta(days=1)
"""Longest time without a look that is taken for one in which the same machines ran: they go on without us."""
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class MachineHour:
    """Milliseconds that machines of one kind were in cells of a deployment within an hour, all machines together.
    `price`: US dollars for an hour of one."""

    machine_ms: int
    busy_ms: int
    price: Decimal

    @property
    def cost(self) -> Decimal:
        return micros(self.machine_ms * self.price / HOUR_MS)

    @property
    def idle(self) -> Decimal:
        """The part of the cost that nobody caused; never more than the whole."""
        return micros((self.machine_ms - min(self.busy_ms, self.machine_ms)) * self.price / HOUR_MS)


@dataclass(frozen=True, slots=True)
class HourSplit(Generic[A]):
    """`of_accounts` and `idle` sum up to `cost` exactly."""

    cost: Decimal
    idle: Decimal
    of_accounts: Mapping[A, Decimal]


def micros(amount: Decimal) -> Decimal:
    return amount.quantize(MICRO, ROUND_HALF_EVEN)


def parts_of_hours(since: datetime, now: datetime) -> list[tuple[datetime, int]]:
    """The time from `since` to `now` as hours and milliseconds in each; no more than `MOST_GAP`, the latest."""
    at, parts = max(since, now - MOST_GAP), []
    while at < now:
        hour = at.replace(minute=0, second=0, microsecond=0)
        end = min(now, hour + HOUR)
        parts.append((hour, round((end - at) / timedelta(milliseconds=1))))
        at = end
    return parts


def split_hour(machines: Iterable[MachineHour], tokens: Mapping[A, int]) -> HourSplit[A]:
    """What an hour of one deployment cost, by account; `tokens` are those that each used in it."""
    hours = list(machines)
    cost = sum((hour.cost for hour in hours), Decimal(0))
    idle = sum((hour.idle for hour in hours), Decimal(0))
    used = {account: count for account, count in tokens.items() if count > 0}
    if not used:
        return HourSplit(cost, cost, {})
    return HourSplit(cost, idle, shares(cost - idle, used))


def shares(amount: Decimal, weights: Mapping[A, int]) -> dict[A, Decimal]:
    """An amount in millionths, by weights, without a rest: each gets its share rounded down, and those with the largest
    remainders one millionth more (Hamilton's method), in the order of `weights` where they are equal."""
    units, total = int(amount / MICRO), sum(weights.values())
    parts = {each: divmod(units * weight, total) for each, weight in weights.items()}
    rest = units - sum(whole for whole, _ in parts.values())
    first = set(sorted(range(len(parts)), key=lambda place: -list(parts.values())[place][1])[:rest])
    return {
        each: (whole + (place in first)) * MICRO for place, (each, (whole, _)) in enumerate(parts.items())
    }  # fmt: skip
