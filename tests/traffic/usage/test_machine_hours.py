"""Machine hours on PostgreSQL, from cells to a conserved split."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from fleet.capacity.planning.rates import Source
from fleet.cells.models import Cell
from fleet.nodes.models import Node, NodeReport
from fleet.regions.models import Rate, Region
from models_registry.instance_types.models import InstanceType
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import IngressReport
from traffic.routing.services.ingresses import ingress_create
from traffic.usage.models import CellHour, CostShare, UsageHour, UsageMark
from traffic.usage.services.machine_hours import machine_hours_count

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
MINUTE = timedelta(minutes=1)


def a_cell(price: float = 2.5) -> None:
    rows.cell("c", rows.node("n-a"), rows.node("n-b"))
    InstanceType.objects.update(price_per_hour=price)
    rows.node("n-spare")


def in_flight(count: int) -> None:
    gate = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    telemetry = {"cells": {"c": {"in_flight": count}}}
    IngressReport.objects.update_or_create(ingress=gate, defaults={"telemetry": telemetry, "connected": True})


def hours(deployment: str = "sim-70b") -> list[Any]:
    columns = ("hour", "machine_ms", "busy_ms", "spent", "settled")
    return list(CellHour.objects.filter(deployment=deployment).order_by("hour").values_list(*columns))


def shared(tenant: str, tokens: int, serving_class: str = "realtime", adapter: str = "", **kind: str) -> None:
    """Tokens as counting writes them: to a usage row and to one of their machines."""
    account: dict[str, Any] = {
        "tenant": tenant, "serving_class": serving_class, "adapter": adapter, "hour": NOW, "deployment": "sim-70b",
    }  # fmt: skip
    place = {"version": "sim-70b@1", "region": "us-east-1", "instance_type": rows.KIND, **kind}
    UsageHour.objects.get_or_create(**account)
    CostShare.objects.create(**account, **place, completion_tokens=tokens)


def test_machines_are_counted_by_hour_those_of_cells_and_spares_apart() -> None:
    a_cell()
    for minutes in (-30, -10, 20):
        machine_hours_count(now=NOW + minutes * MINUTE)
    first, then = 2 * 30 * 60_000, 2 * 20 * 60_000
    assert hours() == [
        (NOW - timedelta(hours=1), first, 0, first * 2_500_000, True),
        (NOW, then, 0, then * 2_500_000, False),
    ]
    spare = CellHour.objects.get(deployment="", settled=True)
    assert (spare.machine_ms, spare.cost, spare.idle) == (first // 2, Decimal("1.25"), Decimal("1.25"))


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
        shared(tenant, tokens)
    UsageHour.objects.create(tenant="rufus", key="0a0a", hour=NOW, arrived=7)
    for minutes in (60, 61, 61):
        machine_hours_count(now=NOW + minutes * MINUTE)
    row = CellHour.objects.get(hour=NOW, deployment="sim-70b")
    assert (row.settled, row.machine_ms, row.busy_ms) == (True, 2 * 60 * 60_000, 2 * 20 * 60_000)
    assert row.cost == Decimal("6.666666")
    of_tenants = {each.tenant: each.machine_cost for each in UsageHour.objects.filter(deployment="sim-70b")}
    assert sum(of_tenants.values()) + row.idle == row.cost
    assert of_tenants["rufus"] == pytest.approx(2 * of_tenants["ada"], abs=Decimal("0.000002"))
    assert UsageHour.objects.get(arrived=7).machine_cost == 0
    own = list(CostShare.objects.all())
    assert sum(share.energy_uj for share in own) + row.idle_uj == row.energy_uj > 0
    assert sum(share.carbon_ug for share in own) + row.idle_carbon_ug == row.carbon_ug > 0
    assert {share.energy_source for share in own} == {Source.ESTIMATED}


def test_machines_are_looked_at_every_fifteen_seconds() -> None:
    a_cell()
    for seconds in range(0, 45, 5):
        machine_hours_count(now=NOW + timedelta(seconds=seconds))
    assert [ms for _, ms, *_ in hours()] == [2 * 30_000]


def test_an_hour_without_tokens_is_idle() -> None:
    a_cell()
    for minutes in (0, 60, 62):
        machine_hours_count(now=NOW + minutes * MINUTE)
    row = CellHour.objects.get(hour=NOW, deployment="sim-70b")
    assert (row.settled, row.cost, row.idle) == (True, Decimal(5), Decimal(5))
    assert row.idle_uj == row.energy_uj


def test_a_cell_that_changes_its_version_in_an_hour_has_two_rows_that_sum_up_to_it() -> None:
    a_cell(price=4)
    in_flight(1)
    machine_hours_count(now=NOW)
    machine_hours_count(now=NOW + 15 * MINUTE)
    Cell.objects.update(model_version=rows.version("2"))
    shared("ada", 10)
    shared("ada", 30, version="sim-70b@2")
    shared("rufus", 10, version="sim-70b@2")
    for minutes in (60, 61):
        machine_hours_count(now=NOW + minutes * MINUTE)
    by_version = {row.version: row for row in CellHour.objects.filter(hour=NOW, deployment="sim-70b")}
    assert {name: row.cost for name, row in by_version.items()} == {"sim-70b@1": Decimal(2), "sim-70b@2": Decimal(6)}
    assert {(share.tenant, share.version): share.cost for share in CostShare.objects.all()} == {
        ("ada", "sim-70b@1"): Decimal(2),
        ("ada", "sim-70b@2"): Decimal("4.5"),
        ("rufus", "sim-70b@2"): Decimal("1.5"),
    }
    assert UsageHour.objects.get(tenant="ada").machine_cost == Decimal("6.5")


def test_what_adapters_cost_is_in_their_own_rows_of_usage() -> None:
    a_cell(price=4)
    in_flight(1)
    machine_hours_count(now=NOW)
    shared("ada", 30)
    shared("ada", 10, adapter="tone")
    for minutes in (60, 61):
        machine_hours_count(now=NOW + minutes * MINUTE)
    by_adapter = dict(UsageHour.objects.filter(tenant="ada").values_list("adapter", "machine_cost"))
    assert by_adapter == {"": Decimal(6), "tone": Decimal(2)}


def test_a_price_that_changes_within_an_hour_counts_from_then_on_and_says_where_it_is_from() -> None:
    a_cell(price=4)
    machine_hours_count(now=NOW)
    machine_hours_count(now=NOW + 30 * MINUTE)
    at = NOW + 30 * MINUTE
    Rate.objects.create(
        kind="machine_price", subject=rows.KIND, value=1, valid_from=at, created_at=at, actor="a", region="us-east-1"
    )
    machine_hours_count(now=NOW + 60 * MINUTE)
    machine_hours_count(now=NOW + 61 * MINUTE)
    row = CellHour.objects.get(hour=NOW, deployment="sim-70b")
    assert (row.cost, row.cost_source) == (Decimal(5), Source.RATED)


def test_meters_are_believed_and_those_of_a_host_that_nodes_share_are_not() -> None:
    def tell(covered_ms: int) -> None:
        meter = {"covers": "host", "since": "a", "microjoules": 2000 * covered_ms, "covered_ms": covered_ms}
        NodeReport.objects.update(telemetry={"energy": [meter]})

    a_cell()
    Region.objects.update(provider="machines")
    tell(0)
    machine_hours_count(now=NOW - MINUTE)
    for second in range(0, 61, 5):
        tell(second * 1000)
        machine_hours_count(now=NOW + timedelta(seconds=second))
    row = CellHour.objects.get(hour=NOW, deployment="sim-70b")
    assert row.measured_uj == 2 * 2000 * 60_000
    Region.objects.update(provider="local")
    tell(80_000)
    machine_hours_count(now=NOW + timedelta(seconds=80))
    row.refresh_from_db()
    assert row.measured_uj == 2 * 2000 * 60_000
    assert not UsageMark.objects.filter(source="energy").exists()


def test_an_unrated_machine_is_unknown() -> None:
    a_cell(price=0)
    InstanceType.objects.create(name="odd", accelerator="odd", chips=1)
    Node.objects.update(instance_type="odd")
    for minutes in (0, 60, 62):
        machine_hours_count(now=NOW + minutes * MINUTE)
    row = CellHour.objects.get(hour=NOW, deployment="sim-70b")
    assert (row.cost_source, row.energy_source, row.carbon_source) == (Source.UNKNOWN,) * 3
    assert row.energy_uj == 0
