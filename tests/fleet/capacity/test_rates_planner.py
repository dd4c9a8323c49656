"""Operators' rates override provider prices, which override lists; missing values are unknown."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from fleet.capacity.planning.rates import (
    GRIDS,
    OVERHEADS,
    PowerRating,
    Rate,
    RateKind,
    Rates,
    Source,
    emission,
    machine_price,
    power_rating,
)
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from tests.fleet.rows import NOW

P5 = INSTANCE_TYPES["p5.48xlarge"]
TRN1 = INSTANCE_TYPES["trn1.32xlarge"]
NONE = Rates((), NOW)


def rate(kind: RateKind, subject: str, value: str, region: str = "", ahead: timedelta = timedelta()) -> Rate:
    return Rate(kind, subject, region, Decimal(value), NOW + ahead)


def test_a_price_is_the_operators_then_the_providers_then_the_lists() -> None:
    own = Rates([rate(RateKind.MACHINE_PRICE, P5.name, "30"), rate(RateKind.MACHINE_PRICE, P5.name, "28", "eu")], NOW)
    for rates, region, stated, micro_usd, source in (
        (own, "us", 44.0, 30_000_000, Source.MEASURED),
        (own, "eu", None, 28_000_000, Source.MEASURED),
        (NONE, "us", 44.0, 44_000_000, Source.MEASURED),
        (NONE, "us", None, 55_040_000, Source.RATED),
    ):
        price = machine_price(rates, P5, region, stated)
        assert (price.micro_usd, price.source) == (micro_usd, source)
    unknown = machine_price(NONE, InstanceShape("x", "cpu"), "us", None)
    assert (unknown.micro_usd, unknown.source) == (0, Source.UNKNOWN)


def test_the_latest_rate_that_has_begun_is_in_force() -> None:
    rates = Rates(
        [
            rate(RateKind.PUE, "eu", "1.5", ahead=timedelta(days=1)),
            rate(RateKind.PUE, "eu", "1.3"),
            rate(RateKind.PUE, "eu", "1.2", ahead=-timedelta(days=9)),
        ],
        NOW,
    )
    assert rates.find(RateKind.PUE, "eu") == Decimal("1.3")
    assert rates.find(RateKind.PUE, "us") is None


def test_a_rate_of_a_market_is_of_machines_that_are_bought_so() -> None:
    spot = replace(rate(RateKind.MACHINE_PRICE, P5.name, "20"), market="spot")
    rates = Rates([spot, rate(RateKind.MACHINE_PRICE, P5.name, "30", "eu")], NOW)
    assert [machine_price(rates, P5, "eu", 44.0, market).micro_usd for market in ("", "on_demand", "spot")] == [
        30_000_000, 30_000_000, 20_000_000,
    ]  # fmt: skip
    assert machine_price(rates, P5, "us", 44.0, "on_demand").micro_usd == 44_000_000


def test_power_is_split_over_accelerators_and_the_rest_where_somebody_says_which_is_whose() -> None:
    assert power_rating(NONE, P5, "us") == PowerRating(5_600, 4_600)
    assert power_rating(NONE, INSTANCE_TYPES["local.cpu"], "us") == PowerRating(0, 3.5)
    assert power_rating(NONE, TRN1, "us") is None
    stated = Rates([rate(RateKind.MACHINE_WATTS, TRN1.name, "8000")], NOW)
    assert power_rating(stated, TRN1, "us") == PowerRating(8000, 0)


def test_a_row_of_an_earlier_release_gets_its_watts_from_the_list() -> None:
    old = InstanceShape("p5.48xlarge", "h100", 8, 8, 640)
    assert power_rating(NONE, old, "us") == power_rating(NONE, P5, "us")


def test_emissions_are_grid_times_overhead_and_say_how_they_are_known() -> None:
    listed = emission(NONE, "east", "us-east-1")
    assert float(listed.ug_per_joule) == pytest.approx(379.069 * 1.15 / 3.6)
    assert listed.source is Source.RATED
    assert emission(NONE, "lab", "").source is Source.ESTIMATED
    own = Rates([rate(RateKind.GRID_INTENSITY, "lab", "36"), rate(RateKind.PUE, "lab", "1")], NOW)
    stated = emission(own, "lab", "")
    assert (float(stated.ug_per_joule), stated.source) == (10.0, Source.MEASURED)


def test_lists_hold_only_what_can_be() -> None:
    assert all(0 < grams < 1500 for grams in GRIDS.values())
    assert all(1 <= overhead < 2 for overhead in OVERHEADS.values())
    assert OVERHEADS.keys() <= GRIDS.keys()
