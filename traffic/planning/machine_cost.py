"""What cells cost and what energy they take by the time of their machines, and whose that is. Pure, in whole units, and
conserved: what an hour of a kind of machines cost is exactly what its accounts and idle time get, to the millionth of a
dollar, the millionth of a joule and the microgram.

A cell with requests in flight, as ingresses see it, is busy; the rest of its time is idle. What its machines cost and
drew while it was busy falls to accounts by what their tokens weigh, all of an hour without tokens to idle time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Generic, NamedTuple, TypeVar

from traffic.planning.price import TokenPrice

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
MICRO = Decimal("0.000001")
MOST_GAP = timedelta(days=1)
"""Longest time without a look that is taken for one in which the same machines ran: they go on without us."""
A = TypeVar("A")


class Kind(NamedTuple):
    """The machines whose hours are added up together: those of one instance type in the cells of a deployment that
    serve one version in one region. No deployment and no version: in no cell."""

    deployment: str
    version: str
    region: str
    instance_type: str


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What a token of a prompt, one of those out of a cache and one of a completion take, relative to each other."""

    prompt: int
    cached: int
    completion: int

    def of(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """What these tokens weigh. Cached ones are a part of the prompt's: more of them than that are none."""
        cached = min(prompt_tokens, cached_tokens)
        fresh = prompt_tokens - cached
        return fresh * self.prompt + cached * self.cached + completion_tokens * self.completion


DEFAULT_WEIGHTS = TokenWeights(prompt=10, cached=1, completion=40)
"""Where no price of tokens says more: the ratios of public price lists, in which an answer costs about four times as
much as a prompt and cached prompts a tenth (OpenAI, Anthropic, 2026)."""


@dataclass(frozen=True, slots=True)
class HourSplit(Generic[A]):
    """Whole units: `of_accounts` and `idle` sum up to `whole` exactly."""

    whole: int
    idle: int
    of_accounts: Mapping[A, int]


def weights_of(price: TokenPrice | None) -> TokenWeights:
    """The weights of a deployment's tokens: those of its prices in force, else the default."""
    if price is None or not (price.prompt or price.completion):
        return DEFAULT_WEIGHTS
    return TokenWeights(*(int(amount / MICRO) for amount in (price.prompt, price.cached, price.completion)))


def micros(amount: Decimal) -> Decimal:
    return amount.quantize(MICRO, ROUND_HALF_EVEN)


def cost_of(spent: int) -> int:
    """Millionths of a dollar. `spent`: milliseconds of machines, each times what it costs an hour in millionths."""
    return round(Decimal(spent) / HOUR_MS)


def parts_of_hours(since: datetime, now: datetime) -> list[tuple[datetime, int]]:
    """The time from `since` to `now` as hours and milliseconds in each; no more than `MOST_GAP`, the latest."""
    at, parts = max(since, now - MOST_GAP), []
    while at < now:
        hour = at.replace(minute=0, second=0, microsecond=0)
        end = min(now, hour + HOUR)
        parts.append((hour, round((end - at) / timedelta(milliseconds=1))))
        at = end
    return parts


def parts_of_amount(amount: int, parts: Iterable[tuple[datetime, int]]) -> dict[datetime, int]:
    """An amount that fell evenly into this time, by hour, without a rest."""
    hours = {hour: ms for hour, ms in parts if ms > 0}
    return shares(amount, hours) if hours else {}


def split_hour(whole: int, busy: int, weights: Mapping[A, int]) -> HourSplit[A]:
    """Whose an amount is. `busy`: the part of it that fell into time with requests in flight, never more than all of
    it; `weights`: what the tokens of each account weigh."""
    used = {account: weight for account, weight in weights.items() if weight > 0}
    if not used:
        return HourSplit(whole, whole, {})
    caused = min(busy, whole)
    return HourSplit(whole, whole - caused, shares(caused, used))


def shares(amount: int, weights: Mapping[A, int]) -> dict[A, int]:
    """A whole amount by weights, without a rest: each gets its share rounded down, and those with the largest
    remainders one more (Hamilton's method), in the order of `weights` where they are equal."""
    total = sum(weights.values())
    parts = {each: divmod(amount * weight, total) for each, weight in weights.items()}
    rest = amount - sum(whole for whole, _ in parts.values())
    by_remainder = sorted(parts, key=lambda each: -parts[each][1])  # stable: equal ones stay in order
    more = set(by_remainder[:rest])
    return {each: whole + (each in more) for each, (whole, _) in parts.items()}
