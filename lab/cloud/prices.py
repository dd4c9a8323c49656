"""The price list, and quotas by the names that a person finds them under. moto knows no prices, and no quota of EC2."""

import json
from typing import Any

from lab.cloud.limits import FAMILIES, STANDARD
from lab.cloud.wire import Call, Refused
from lab.cloud.world import World, handles

PRICING_REGIONS = ("us-east-1", "eu-central-1", "ap-south-1")
"""Where the price list of all regions is served."""
UNBOUND = 100_000
"""vCPUs of a quota that no test has set."""
QUOTAS = {
    name: f"L-{number:08X}"
    for number, name in enumerate(
        f"{before}{family}{after}"
        for family in (*FAMILIES.values(), STANDARD)
        for before, after in (("Running On-Demand ", " instances"), ("All ", " Spot Instance Requests"))
    )
}
"""Name -> code. Codes are made up: what is looked for by its code is not found here."""


@handles("pricing", "GetProducts")
def get_products(world: World, call: Call) -> dict[str, Any]:
    """Of EC2 on demand. Each product is JSON in a string."""
    if call.region not in PRICING_REGIONS:
        raise Refused("AccessDeniedException", f"There is no price list in {call.region}.")
    asked = {each["Field"]: each["Value"] for each in call.params.get("Filters") or ()}
    found = [
        _product(kind, region, price)
        for (kind, region), price in sorted(world.prices.items())
        if asked.get("instanceType", kind) == kind and asked.get("regionCode", region) == region
    ]
    return {"FormatVersion": "aws_v1", "PriceList": found}


def _product(instance_type: str, region: str, price: float) -> str:
    sku = f"SKU{instance_type}{region}".upper()
    dimension = {"unit": "Hrs", "description": "Linux", "pricePerUnit": {"USD": f"{price:.10f}"}}
    terms = {"OnDemand": {f"{sku}.T": {"sku": sku, "priceDimensions": {f"{sku}.T.D": dimension}}}}
    attributes = {"instanceType": instance_type, "regionCode": region, "operatingSystem": "Linux"}
    return json.dumps({"product": {"sku": sku, "attributes": attributes}, "terms": terms})


@handles("service-quotas", "ListServiceQuotas")
def list_service_quotas(world: World, call: Call) -> dict[str, Any]:
    """vCPUs of EC2, by two pages."""
    if call.params["ServiceCode"] != "ec2":
        raise Refused("NoSuchResourceException", f"There is no service {call.params['ServiceCode']}.")
    names, first = list(QUOTAS), not call.params.get("NextToken")
    half = len(names) // 2
    return {
        "Quotas": [
            {
                "ServiceCode": "ec2", "QuotaName": name, "QuotaCode": QUOTAS[name], "Unit": "None",
                "Value": float(world.quotas.get(name, UNBOUND)), "Adjustable": True, "GlobalQuota": False,
            }
            for name in (names[:half] if first else names[half:])
        ],
        **({"NextToken": "2"} if first else {}),
    }  # fmt: skip
