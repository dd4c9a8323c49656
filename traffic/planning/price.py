"""What tokens cost: the price of a deployment that was in force when they were counted. Pure, and exact: prices have
six places, tokens are whole, so an amount has twelve, and no sum is ever rounded before it is shown."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

MILLION = Decimal(1_000_000)
SHOWN = Decimal("0.000001")
"""Millionths of a dollar: how finely amounts are shown."""
CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """US dollars for a million tokens of one deployment, from `valid_from` until a later one. Prompt tokens that came
    out of a cache cost `cached`."""

    deployment: str
    valid_from: datetime
    prompt: Decimal
    cached: Decimal
    completion: Decimal


def prices_at(prices: Iterable[TokenPrice], now: datetime) -> dict[str, TokenPrice]:
    """Deployment -> the price in force."""
    in_force: dict[str, TokenPrice] = {}
    for price in sorted(prices, key=lambda price: price.valid_from):
        if price.valid_from <= now:
            in_force[price.deployment] = price
    return in_force


def charge(tokens: Mapping[str, int], price: TokenPrice | None) -> Decimal:
    """US dollars for these tokens, by the names that cells count them under; 0 without a price. Cached tokens are a
    part of the prompt's: more of them than that are none."""
    if price is None:
        return Decimal(0)
    prompt, completion = tokens.get("prompt_tokens", 0), tokens.get("completion_tokens", 0)
    cached = min(prompt, tokens.get("cached_tokens", 0))
    return ((prompt - cached) * price.prompt + cached * price.cached + completion * price.completion) / MILLION
