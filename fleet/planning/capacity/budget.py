"""How many cells of a deployment its budget pays for, region by region. Pure; no numpy, for web.

The autoscaler shares a budget by what is lacking at the moment. A plan cannot, for a day has many moments; so it goes
by the greatest load that is expected of each region.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.planning.capacity.view import PlannedPlace


def within_budget(
    places: Sequence[PlannedPlace], prices: Mapping[str, float], budget: float | None
) -> tuple[PlannedPlace, ...]:
    """The places of a deployment with no more cells than its budget, US dollars an hour, pays for all together: what
    the least of each leaves of it is shared by the greatest p90. `prices`: US dollars an hour of a cell by region; 0:
    unknown, which counts as nothing, as for the autoscaler. What ranges begin with is never taken away for it."""
    if budget is None:
        return tuple(places)
    left = max(0.0, budget - sum(place.least * prices[place.region] for place in places))
    peaks = {one.region: max(one.demand.p90, default=0.0) if one.demand else 0.0 for one in places}
    total = sum(peaks.values())
    return tuple(
        _bounded(one, left * peaks[one.region] / total if total else 0.0, prices[one.region]) for one in places
    )


def _bounded(place: PlannedPlace, left: float, price: float) -> PlannedPlace:
    """Where nobody forecasts the load the plan keeps what there is, and buys nothing."""
    if not price or place.demand is None:
        return place
    most = place.least + int(left / price)
    return replace(place, most=most, is_bound_by_budget=True) if most < place.most else place
