"""Hours of machines over real PostgreSQL, from what is in cells to a split that is conserved."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from fleet.models import InstanceType
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.models import CellHour, IngressReport, UsageHour
from traffic.services.ingress import ingress_create
from traffic.services.machine_hours import machine_hours_count

pytestmark = pytest.mark.django_db
MINUTE = timedelta(minutes=1)


def a_cell(price: float = 2.5) -> None:
    rows.cell("c", rows.node("n-a"), rows.node("n-b"))
    InstanceType.objects.update(price_per_hour=price)
    rows.node("n-spare")


def in_flight(count: int) -> None:
    gate = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    telemetry = {"cells": {"c": {"in_flight": count}}}
    IngressReport.objects.update_or_create(ingress=gate, defaults={"telemetry": telemetry, "connected": True})


def hours() -> list[Any]:
    return list(CellHour.objects.order_by("hour").values_list("hour", "machine_ms", "busy_ms", "price", "settled"))


def test_machines_in_cells_are_counted_by_hour_and_spares_are_not() -> None:
    a_cell()
    for minutes in (-30, -10, 20):
        machine_hours_count(now=NOW + minutes * MINUTE)
    assert hours() == [
        (NOW - timedelta(hours=1), 2 * 30 * 60_000, 0, Decimal("2.5"), True),
        (NOW, 2 * 20 * 60_000, 0, Decimal("2.5"), False),
    ]


def test_a_look_that_is_repeated_or_late_counts_nothing_twice() -> None:
    a_cell()
    for minutes in (0, 10, 10, 5, 10):
        machine_hours_count(now=NOW + minutes * MINUTE)
    assert [(ms, busy) for _, ms, busy, *_ in hours()] == [(2 * 10 * 60_000, 0)]


def test_an_hour_that_is_over_is_split_by_tokens_and_tenants_and_idle_time_sum_up_to_it() -> None:
    a_cell(price=3.333333)
    machine_hours_count(now=NOW)
    in_flight(2)
    machine_hours_count(now=NOW + 20 * MINUTE)
    in_flight(0)
    machine_hours_count(now=NOW + 50 * MINUTE)
    for tenant, tokens in (("rufus", 2), ("ada", 1), ("", 4)):
        UsageHour.objects.create(tenant=tenant, deployment="sim-70b", hour=NOW, completion_tokens=tokens)
    UsageHour.objects.create(tenant="rufus", key="0a0a", hour=NOW, arrived=7)
    for minutes in (60, 61, 61):
        machine_hours_count(now=NOW + minutes * MINUTE)
    row = CellHour.objects.get(hour=NOW)
    assert (row.settled, row.machine_ms, row.busy_ms) == (True, 2 * 60 * 60_000, 2 * 20 * 60_000)
    assert row.cost == Decimal("6.666666")
    of_tenants = {each.tenant: each.machine_cost for each in UsageHour.objects.filter(deployment="sim-70b")}
    assert sum(of_tenants.values()) + row.idle == row.cost
    assert of_tenants["rufus"] == pytest.approx(2 * of_tenants["ada"], abs=Decimal("0.000002"))
    assert UsageHour.objects.get(arrived=7).machine_cost == 0


def test_an_hour_that_nobody_used_is_idle() -> None:
    a_cell()
    for minutes in (0, 60, 62):
        machine_hours_count(now=NOW + minutes * MINUTE)
    row = CellHour.objects.get(hour=NOW)
    assert (row.settled, row.cost, row.idle) == (True, Decimal(5), Decimal(5))
