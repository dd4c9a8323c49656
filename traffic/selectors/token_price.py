"""Prices of the tokens of deployments, by the rates in force."""

from datetime import datetime

from fleet.models import Rate
from fleet.planning.rate import OF_TOKENS, Rates
from traffic.planning.price import TokenPrice, token_price


def token_prices(now: datetime) -> dict[str, TokenPrice]:
    """Deployment -> the price in force, in one query."""
    begun = Rate.objects.filter(kind__in=OF_TOKENS, valid_from__lte=now).order_by("kind", "subject", "-valid_from")
    in_force = [row.rate() for row in begun.distinct("kind", "subject")]
    rates = Rates(in_force, now)
    found = {name: token_price(rates, name) for name in sorted({rate.subject for rate in in_force})}
    return {name: price for name, price in found.items() if price is not None}
