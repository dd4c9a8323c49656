"""Reads token prices and weights. It never writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.capacity.planning.rates import OF_TOKENS, Rates, Source
from fleet.cells.models import CellMember
from fleet.regions.models import Rate
from traffic.usage.models import TokenFit
from traffic.usage.planning.prices import FIT_KEPT, TokenPrice, TokenWeights, token_price, weights_of


def token_prices(now: datetime) -> dict[str, TokenPrice]:
    """Returns prices in force by deployment, in one query."""
    begun = Rate.objects.filter(kind__in=OF_TOKENS, valid_from__lte=now).order_by("kind", "subject", "-valid_from")
    in_force = [row.rate() for row in begun.distinct("kind", "subject")]
    rates = Rates(in_force, now)
    found = {name: token_price(rates, name) for name in sorted({rate.subject for rate in in_force})}
    return {name: price for name, price in found.items() if price is not None}


Fits = Mapping[tuple[str, str], TokenWeights]
"""Weights by (version, instance type)."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """`source`: `measured` from steps of engines, `rated` from token prices in force, `estimated` from price lists."""

    weights: TokenWeights
    source: Source


def fits_at(now: datetime) -> Fits:
    """Returns recent fits, in one query."""
    rows = TokenFit.objects.filter(fitted_at__gte=now - timedelta(days=FIT_KEPT))
    return {(row.version, row.instance_type): row.weights() for row in rows}


def weighing(fits: Fits, version: str, instance_type: str, price: TokenPrice | None) -> Weighing:
    """Returns the token weights of a version on an instance type. `price` is that of their deployment in force."""
    fitted = fits.get((version, instance_type))
    if fitted is not None:
        return Weighing(fitted, Source.MEASURED)
    is_stated = price is not None and bool(price.prompt or price.completion)
    return Weighing(weights_of(price), Source.RATED if is_stated else Source.ESTIMATED)


@dataclass(frozen=True, slots=True)
class TokenWeight:
    """Token weights of a version on an instance type, in computed prompt tokens. `fit` is the measurement."""

    version: str
    instance_type: str
    cached: float
    completion: float
    source: Source
    fit: TokenFit | None


def token_weights(now: datetime) -> list[TokenWeight]:
    """Returns the weights of all versions in cells or with a recent measurement, by version and type, in three
    queries."""
    fits = {
        (row.version, row.instance_type): row
        for row in TokenFit.objects.filter(fitted_at__gte=now - timedelta(days=FIT_KEPT))
    }
    prices = token_prices(now)
    served = CellMember.objects.filter(rank=0).order_by("cell__deployment_id")
    columns = (
        "cell__deployment_id",
        "cell__model_version__model_id",
        "cell__model_version__version",
        "node__instance_type_id",
    )
    places: dict[tuple[str, str], TokenPrice | None] = dict.fromkeys(fits)
    for deployment, model, version, instance_type in served.values_list(*columns).distinct():
        places[f"{model}@{version}", instance_type] = prices.get(deployment)
    by_fit = {place: row.weights() for place, row in fits.items()}
    found = []
    for version, instance_type in sorted(places):
        weighed = weighing(by_fit, version, instance_type, places[version, instance_type])
        prompt = max(1, weighed.weights.prompt)
        found.append(
            TokenWeight(
                version, instance_type, weighed.weights.cached / prompt, weighed.weights.completion / prompt,
                weighed.source, fits.get((version, instance_type)),
            )
        )  # fmt: skip
    return found
