"""What machines cost now: on demand from AWS's price list, spot from its history. Reads only. What is not stated
without doubt is left out: a price that is unknown is better than a wrong one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from engine_agent.protocol.strict_json import strict_loads
from fleet.providers.aws.calls import call, pages

PRICE_LIST = "us-east-1"
"""One of the regions that serve the list, of all regions
(https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html)."""
LINUX = {
    "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
}  # fmt: skip
SPOT_PRODUCT = "Linux/UNIX"
PAGES_MOST = 10

Call = Callable[..., dict[str, Any]]


def on_demand_prices(region: str, types: Iterable[str], send: Call = call) -> dict[str, float]:
    """US dollars an hour of a machine of each type, by type, as far as the list says one price. `region`: as AWS calls
    it.

    Raises:
        CallFailed: the list was not read.
    """
    found = {
        kind: {price for product in _products(region, kind, send) for price in prices_of(product)} for kind in types
    }
    return {kind: prices.pop() for kind, prices in found.items() if len(prices) == 1}


def _products(region: str, kind: str, send: Call) -> Iterator[str]:
    asked = {"instanceType": kind, "regionCode": region, **LINUX}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in asked.items()]
    token = ""
    for _ in range(PAGES_MOST):
        more = {"NextToken": token} if token else {}
        page = send("pricing", "GetProducts", PRICE_LIST, ServiceCode="AmazonEC2", Filters=filters, **more)
        yield from page["PriceList"]
        token = page.get("NextToken") or ""
        if not token:
            return


def prices_of(product: str) -> set[float]:
    """The prices on demand of a product of the list, in US dollars an hour, without those of 0, which are of machines
    in reservations. None of one that makes no sense."""
    try:
        terms = strict_loads(product)["terms"].get("OnDemand", {})
        dimensions = [one for term in terms.values() for one in term["priceDimensions"].values()]
        prices = {float(one["pricePerUnit"]["USD"]) for one in dimensions if one["unit"] == "Hrs"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {price for price in prices if 0 < price < float("inf")}


def spot_prices(region: str, types: Iterable[str], now: datetime) -> dict[tuple[str, str], float]:
    """US dollars an hour of a spot machine now, by type and zone.

    Raises:
        CallFailed: the history was not read.
    """
    asked = {"InstanceTypes": sorted(types), "ProductDescriptions": [SPOT_PRODUCT], "StartTime": now}
    rows = [row for page in pages("DescribeSpotPriceHistory", region, **asked) for row in page["SpotPriceHistory"]]
    return latest(rows)


def latest(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """The youngest price of each type and zone in rows of the history."""
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    for row in rows:
        key, at = (row["InstanceType"], row["AvailabilityZone"]), row["Timestamp"]
        if key not in newest or newest[key][0] < at:
            newest[key] = (at, float(row["SpotPrice"]))
    return {key: price for key, (_, price) in newest.items() if price > 0}
