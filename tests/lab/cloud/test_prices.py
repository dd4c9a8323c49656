"""Prices and quotas in the cloud of tests."""

import json

import pytest

from lab.cloud.server import World
from tests.lab.cloud.conftest import refusal

pytestmark = pytest.mark.cloud


def test_a_price_is_found_by_type_and_region(world: World) -> None:
    world.prices = {("trn1.32xlarge", "us-east-1"): 21.5, ("trn1.32xlarge", "us-west-2"): 22.0}
    asked = {"instanceType": "trn1.32xlarge", "regionCode": "us-east-1"}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in asked.items()]

    found = world.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]

    (product,) = map(json.loads, found)
    (term,) = product["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    assert float(dimension["pricePerUnit"]["USD"]) == 21.5
    elsewhere = world.client("pricing", "us-west-2")
    assert refusal(elsewhere.get_products, ServiceCode="AmazonEC2") == "AccessDeniedException"


def test_quotas_come_in_pages(world: World) -> None:
    world.quotas = {"Running On-Demand Trn instances": 256}
    pages = world.client("service-quotas").get_paginator("list_service_quotas").paginate(ServiceCode="ec2")

    found = {each["QuotaName"]: each["Value"] for page in pages for each in page["Quotas"]}

    assert found["Running On-Demand Trn instances"] == 256
    assert found["All P Spot Instance Requests"] > 10_000
