"""How many machines, and for how much money, may be launched in an hour: the bound on every fault of ours. Pure.

It is asked last before a launch, by the provider itself, so that no planner, bug or operator goes past it. What may
have been launched counts as launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

WINDOW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class LaunchCap:
    """Of one region. `machines`: launched in an hour. `price_per_hour`: US dollars that the machines launched within an
    hour may cost in each hour; None: no bound."""

    machines: int
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Machines of one attempt that was carried out or is in doubt. `price_per_hour`: of one machine, in US dollars;
    None: not known."""

    at: datetime
    count: int
    price_per_hour: float | None


@dataclass(frozen=True, slots=True)
class CapRefusal:
    """`until`: when it may be launched, if nothing else is; None: not before the cap or the price is changed."""

    reason: str
    until: datetime | None


def cap_refusal(
    count: int, price_per_hour: float | None, launches: Sequence[Launch], cap: LaunchCap, now: datetime
) -> CapRefusal | None:
    """Why so many machines may not be launched now; None: they may. `price_per_hour`: of one machine, in US dollars."""
    recent = sorted((one for one in launches if one.at > now - WINDOW), key=lambda one: one.at)
    there = sum(one.count for one in recent)
    if there + count > cap.machines:
        said = f"{there} machines were launched within an hour, and {count} more would pass the cap of {cap.machines}"
        return CapRefusal(said, _fits_at(recent, cap.machines - count, [one.count for one in recent]))
    if cap.price_per_hour is None:
        return None
    if price_per_hour is None:
        said = "the price of such a machine is not known, so the cap on prices cannot be judged: set its price"
        return CapRefusal(said, None)
    prices = [one.count * (one.price_per_hour or 0.0) for one in recent]
    price = count * price_per_hour
    if sum(prices) + price > cap.price_per_hour:
        said = (
            f"machines for {sum(prices):.2f} dollars an hour were launched within an hour, and {price:.2f} more would "
            f"pass the cap of {cap.price_per_hour:.2f}"
        )
        return CapRefusal(said, _fits_at(recent, cap.price_per_hour - price, prices))
    return None


def _fits_at(recent: Sequence[Launch], room: float, amounts: Sequence[float]) -> datetime | None:
    """When what is left of `amounts` is at most `room`, as launches leave the window; None: never."""
    left = sum(amounts)
    for launch, amount in zip(recent, amounts, strict=True):
        if room < 0:
            return None
        left -= amount
        if left <= room:
            return launch.at + WINDOW
    return None
