"""What tokens weigh: as measured of a version on an instance type, else as prices in force say, else as lists do."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.models import CellMember
from fleet.planning.rate import Source
from traffic.models import TokenFit
from traffic.planning.machine_cost import TokenWeights, weights_of
from traffic.planning.price import TokenPrice
from traffic.planning.token_fit import FIT_KEPT
from traffic.selectors.token_price import token_prices

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
    is_stated = price is not None and bool(price.prompt or price.completion)
    return Weighing(weights_of(price), Source.RATED if is_stated else Source.ESTIMATED)


@dataclass(frozen=True, slots=True)
class TokenWeight:
    """What tokens of a version weigh on an instance type, in computed prompt tokens. `fit`: how that was measured."""

    version: str
    instance_type: str
    cached: float
    completion: float
    source: Source
    fit: TokenFit | None


def token_weights(now: datetime) -> list[TokenWeight]:
    """Of all that cells serve now, and of what was measured lately, by version and type; in three queries."""
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
