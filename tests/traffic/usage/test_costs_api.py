"""Costs over HTTP: tenants + idle = cells, figures per million tokens with their sources; as JSON, CSV, Parquet."""

import csv
import io
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from fleet.capacity.planning.rates import Source
from kernel import clock
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from traffic.usage.models import CellHour, CostShare, TokenFit

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
COSTS = "/api/v1/costs"
KIND = {"deployment": "sim", "version": "sim@1", "region": "east", "instance_type": "p5"}
SOURCES = {"cost_source": Source.RATED, "energy_source": Source.MEASURED, "carbon_source": Source.RATED}


def this_hour(back: int = 0) -> Any:
    return clock.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=back)


def machines(back: int = 3, **columns: Any) -> None:
    columns = {
        **KIND, "machine_ms": 7_200_000, "cost": Decimal(6), "idle": Decimal("2.5"), "energy_uj": 9_000_000,
        "measured_uj": 9_000_000, "idle_uj": 1_000_000, "carbon_ug": 900_000, "idle_carbon_ug": 100_000, **SOURCES,
        "settled": True, "refused": 3, **columns,
    }  # fmt: skip
    CellHour.objects.create(hour=this_hour(back), **columns)


def share(tenant: str, cost: str = "1.75", back: int = 3, **columns: Any) -> None:
    columns = {
        **KIND, "serving_class": "realtime", "prompt_tokens": 300_000, "cached_tokens": 100_000,
        "completion_tokens": 200_000, "cost": Decimal(cost), "energy_uj": 4_000_000, "carbon_ug": 400_000, **SOURCES,
        **columns,
    }  # fmt: skip
    CostShare.objects.create(tenant=tenant, hour=this_hour(back), **columns)


def found(**query: str) -> Any:
    response = bearer().get(COSTS, query)
    assert response.status_code == 200, response.content
    return response.json()


def a_fleet() -> None:
    machines()
    share("rufus")
    share("ada", serving_class="batch")
    machines(deployment="", version="", cost=Decimal(3), idle=Decimal(3), energy_uj=5, idle_uj=5)


def test_tenants_and_idle_are_cells_and_with_spares_the_bill() -> None:
    a_fleet()
    machines(back=0, settled=False, cost=0, idle=0)
    totals = found()["totals"]
    assert Decimal(totals["cost_usd"]) + Decimal(totals["idle_cost_usd"]) == Decimal(totals["cells_usd"]) == 6
    assert (totals["spares_usd"], totals["bill_usd"]) == ("3.000000", "9.000000")
    assert (totals["open_machine_hours"], totals["measured_percent"], totals["refused_readings"]) == (2.0, 100.0, 3)
    joules = Decimal(totals["energy_j"]) + Decimal(totals["idle_energy_j"])
    assert joules == 9


def test_figures_are_for_a_million_tokens_and_say_how_well_they_are_known() -> None:
    a_fleet()
    (row,) = found()["rows"]
    assert (row["version"], row["type"], row["region"], row["start"]) == ("sim@1", "p5", None, None)
    assert (row["usd_per_mtoken"], row["usd_per_mtoken_with_idle"]) == (3.5, 6.0)
    assert (row["joules_per_mtoken"], row["joules_per_mtoken_with_idle"]) == (8.0, 9.0)
    assert (row["gco2e_per_mtoken"], row["gco2e_per_mtoken_with_idle"]) == (0.8, 0.9)
    assert (row["cost_source"], row["energy_source"], row["carbon_source"]) == ("rated", "measured", "rated")


def test_tenants_and_classes_have_no_idle_time() -> None:
    a_fleet()
    body = found(group="tenant,class")
    assert [(row["tenant"], row["class"], row["cost_usd"], row["idle_cost_usd"]) for row in body["rows"]] == [
        ("ada", "batch", "1.750000", None), ("rufus", "realtime", "1.750000", None),
    ]  # fmt: skip
    assert (body["rows"][0]["usd_per_mtoken"], body["rows"][0]["usd_per_mtoken_with_idle"]) == (3.5, None)
    assert body["totals"]["idle_cost_usd"] == "2.500000"
    of_one = found(group="version", tenant="ada")
    assert (of_one["totals"]["cost_usd"], of_one["totals"]["cells_usd"], of_one["totals"]["bill_usd"]) == (
        "1.750000", None, None,
    )  # fmt: skip


def test_what_is_not_known_is_no_figure() -> None:
    machines(energy_source=Source.UNKNOWN, carbon_source=Source.UNKNOWN)
    share("rufus", energy_source=Source.UNKNOWN, carbon_source=Source.UNKNOWN)
    machines(back=4, version="sim@2")
    known, idle = found(group="version")["rows"]
    assert (known["usd_per_mtoken"], known["joules_per_mtoken"], known["gco2e_per_mtoken"]) == (7 / 4 / 0.5, None, None)
    assert known["energy_source"] == "unknown"
    assert (idle["version"], idle["usd_per_mtoken"], idle["idle_cost_usd"]) == ("sim@2", None, "2.500000")


def test_tokens_of_an_hour_that_is_not_split_are_in_no_figure() -> None:
    machines(back=0, settled=False, cost=0, idle=0)
    share("rufus", back=0, cost="0")
    assert found()["rows"] == []


def test_costs_are_filtered_and_cut_by_time() -> None:
    a_fleet()
    machines(back=30, region="west", cost=Decimal(1), idle=Decimal(1))
    assert [row["region"] for row in found(group="region", **{"from": "3d"})["rows"]] == ["east", "west"]
    west = found(region="west", **{"from": "3d"})["totals"]
    assert (west["cells_usd"], west["spares_usd"]) == ("1.000000", "0.000000")
    assert found(deployment="sim")["totals"]["spares_usd"] is None
    starts = [row["start"] for row in found(by="hour", group="none", **{"from": "3d"})["rows"]]
    assert starts == [f"{this_hour(back):%Y-%m-%dT%H:%M:%SZ}" for back in (3, 30)]
    limited = found(group="region", limit="1", **{"from": "3d"})
    assert (len(limited["rows"]), limited["truncated"]) == (1, True)


@pytest.mark.parametrize(
    ("query", "field"),
    [({"group": "key"}, "group"), ({"by": "week"}, "by"), ({"class": "urgent"}, "class"), ({"key": "0a"}, "key"),
     ({"as": "xml"}, "as"), ({"limit": "0"}, "limit"), ({"version": "a\x00"}, "version")],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_its_name(query: dict[str, str], field: str) -> None:
    response = bearer().get(COSTS, query)
    assert response.status_code == 400
    assert field in str(response.json())


def test_tables_have_the_same_rows() -> None:
    from arro3.io import read_parquet

    a_fleet()
    text: Any = bearer().get(COSTS, {"as": "csv", "group": "version,region"})
    body = b"".join(text.streaming_content).decode()
    (line,) = csv.DictReader(io.StringIO(body, newline=""))
    assert (line["version"], line["region"], line["cost_usd"], line["usd_per_mtoken"]) == (
        "sim@1", "east", "3.500000", "3.500000",
    )  # fmt: skip
    assert line["energy_source"] == "measured"
    parquet: Any = bearer().get(COSTS, {"as": "parquet", "group": "tenant"})
    assert "costs-" in parquet["Content-Disposition"]
    table = read_parquet(io.BytesIO(b"".join(parquet.streaming_content))).read_all().to_struct_array().to_pylist()
    assert [(row["tenant"], row["cost_usd"], row["idle_cost_usd"]) for row in table] == [
        ("ada", Decimal("1.75"), None), ("rufus", Decimal("1.75"), None),
    ]  # fmt: skip


def test_more_costs_ask_the_database_as_often() -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            found(group="tenant,version", by="day")
        return len(captured)

    a_fleet()
    queries()  # the first request loads what is then cached
    few = queries()
    for number in range(5):
        share(f"tenant-{number}", version=f"sim@{number}", back=number + 4)
    assert queries() == few


def test_average_and_marginal_price_of_batches_need_differing_hours() -> None:
    assert found()["batches"] is None
    for back in range(1, 41):
        batches = 200_000 * (back % 5)
        machines(back=back, cost=10 + Decimal(batches) / 500_000, energy_uj=10**7)
        share("ada", back=back, completion_tokens=10_000 * (back % 7))
        if batches:
            share("eve", back=back, serving_class="batch", prompt_tokens=0, cached_tokens=0, completion_tokens=batches)
    price = found(**{"from": "2d"})["batches"]
    assert (price["tokens"], price["usd_per_mtoken"], price["hours"]) == (16_000_000, 3.5, 40)
    assert price["marginal_usd_per_mtoken"] == pytest.approx(2.0, rel=0.01)
    assert price["marginal_joules_per_mtoken"] == 0.0
    assert found(**{"class": "batch"})["batches"] is None


def test_what_tokens_weigh_says_how_it_is_known() -> None:
    rows.cell("c", rows.node("n-a"), rows.node("n-b"))
    (weight,) = found()["weights"]
    assert (weight["version"], weight["type"], weight["known"]) == ("sim-70b@1", rows.KIND, "estimated")
    assert (weight["cached"], weight["completion"], weight["samples"]) == (0.1, 4.0, None)
    TokenFit.objects.create(
        version="sim-70b@1", instance_type=rows.KIND, prompt=125_000, cached=0, completion=1_500_000, step_us=20_000,
        sequence_us=250, prompt_us=125, cached_us=0, sequences=16, samples=400, nodes=3, error=0.02, weight_error=0.01,
        fitted_at=clock.now(),
    )  # fmt: skip
    (weight,) = found()["weights"]
    assert (weight["known"], weight["completion"], weight["nodes"], weight["error_percent"]) == (
        "measured",
        12.0,
        3,
        2.0,
    )
