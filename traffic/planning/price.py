"""What tokens cost: the price of a deployment that was in force when they were counted. Pure, and exact: prices have
six places, tokens are whole, so an amount has twelve, and no sum is ever rounded before it is shown."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from fleet.planning.rate import RateKind, Rates

MILLION = Decimal(1_000_000)
SHOWN = Decimal("0.000001")
"""Millionths of a dollar: how finely amounts are shown."""
CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """US dollars for a million tokens. Prompt tokens that came out of a cache cost `cached`."""

    prompt: Decimal
    cached: Decimal
    completion: Decimal


def token_price(rates: Rates, deployment: str) -> TokenPrice | None:
    """The price of a deployment's tokens by the rates in force, None without a rate of prompts or completions. Cached
    prompt tokens without a rate cost as much as others."""
    prompt = rates.find(RateKind.PROMPT_PRICE, deployment)
    cached = rates.find(RateKind.CACHED_PRICE, deployment)
    completion = rates.find(RateKind.COMPLETION_PRICE, deployment)
    if prompt is None and completion is None:
        return None
    fresh = prompt or Decimal(0)
    return TokenPrice(fresh, fresh if cached is None else cached, completion or Decimal(0))


def charge(tokens: Mapping[str, int], price: TokenPrice | None) -> Decimal:
    """US dollars for these tokens, by the names that cells count them under; 0 without a price. Cached tokens are a
    part of the prompt's: more of them than that are none."""
    if price is None:
        return Decimal(0)
    prompt, completion = tokens.get("prompt_tokens", 0), tokens.get("completion_tokens", 0)
    cached = min(prompt, tokens.get("cached_tokens", 0))
    return ((prompt - cached) * price.prompt + cached * price.cached + completion * price.completion) / MILLION
