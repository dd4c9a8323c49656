"""What tokens weigh: as measured of a version on an instance type, else as prices in force say, else as lists do."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.planning.rate import Source
from traffic.models import TokenFit, TokenPrice
from traffic.planning.machine_cost import TokenWeights, weights_of
from traffic.planning.token_fit import FIT_KEPT

Fits = Mapping[tuple[str, str], TokenWeights]
"""(version, instance type) -> weights."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """`source`: `measured` by steps of engines, `rated` by prices of tokens in force, `estimated` by lists of them."""

    weights: TokenWeights
    source: Source


def fits_at(now: datetime) -> Fits:
    """Those that are young enough, in one query."""
    rows = TokenFit.objects.filter(fitted_at__gte=now - timedelta(days=FIT_KEPT))
    return {(row.version, row.instance_type): row.weights() for row in rows}


def weighing(fits: Fits, version: str, instance_type: str, price: TokenPrice | None) -> Weighing:
    """What tokens of a version weigh on an instance type. `price`: that of their deployment in force."""
    fitted = fits.get((version, instance_type))
    if fitted is not None:
        return Weighing(fitted, Source.MEASURED)
    stated = price.price() if price is not None else None
    is_stated = stated is not None and bool(stated.prompt or stated.completion)
    return Weighing(weights_of(stated), Source.RATED if is_stated else Source.ESTIMATED)


def price_of(deployment: str, at: datetime) -> TokenPrice | None:
    """The price of a deployment's tokens in force."""
    return TokenPrice.objects.filter(deployment=deployment, valid_from__lte=at).first()
