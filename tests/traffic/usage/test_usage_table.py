"""Usage over HTTP: groups and totals as JSON, CSV and Parquet, charges, and access."""

import csv
import io
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from kernel import clock
from tests.controlplane.api.client import bearer
from traffic.usage.models import SummedDay, UsageDay, UsageHour

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
USAGE = "/api/v1/usage"


def this_hour(back: int = 0) -> Any:
    return clock.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=back)


def used(tenant: str, key: str = "0a0a", deployment: str = "sim", back: int = 0, **columns: Any) -> None:
    columns = {"serving_class": "realtime", "requests": 1, **columns}
    UsageHour.objects.create(tenant=tenant, key=key, deployment=deployment, hour=this_hour(back), **columns)


def found(**query: str) -> Any:
    response = bearer().get(USAGE, query)
    assert response.status_code == 200, response.content
    return response.json()


def test_rows_are_added_up_by_what_was_requested_and_totals_are_of_all() -> None:
    used("rufus", requests=3, prompt_tokens=10, charged=Decimal("0.1234567"))
    used("rufus", "0b0b", requests=4, serving_class="batch")
    used("ada", "0c0c", "other", requests=5)
    used("rufus", "0a0a", "", serving_class="", requests=0, arrived=9, limited=1)
    body = found(group="tenant")
    assert [(row["tenant"], row["requests"], row["arrived"]) for row in body["rows"]] == [
        ("ada", 5, 0),
        ("rufus", 7, 9),
    ]
    assert body["rows"][1]["charged"] == "0.123457"
    assert (body["rows"][1]["key"], body["rows"][1]["class"], body["rows"][1]["start"]) == (None, None, None)
    assert (body["totals"]["requests"], body["totals"]["limited"]) == (12, 1)
    by_key = found(group="key,class", tenant="rufus")
    assert [(row["key"], row["class"], row["requests"]) for row in by_key["rows"]] == [
        ("0a0a", "", 0), ("0a0a", "realtime", 3), ("0b0b", "batch", 4),
    ]  # fmt: skip
    for query in ({"deployment": "other"}, {"class": "batch"}, {"key": "sw_0b0b"}):
        assert len(found(group="none", **query)["rows"]) == 1
    assert found(group="none")["rows"][0]["requests"] == 12


def test_time_is_cut_as_requested_and_days_without_hours_are_in_it() -> None:
    used("rufus", back=1, requests=2)
    used("rufus", back=200, requests=100)
    old = (clock.now() - timedelta(days=120)).date()
    UsageDay.objects.create(tenant="rufus", day=old, requests=40)
    SummedDay.objects.create(day=old, is_current=True, has_hours=False)
    assert found()["totals"]["requests"] == 2
    assert found(**{"from": "30d"})["totals"]["requests"] == 102
    assert found(**{"from": "200d"}, by="month")["totals"]["requests"] == 142
    (day,) = found(**{"from": "200d", "to": "100d"}, by="day")["rows"]
    assert (day["start"], day["requests"]) == (f"{old}T00:00:00Z", 40)
    assert found(**{"from": "200d", "to": "100d"}, by="hour")["rows"] == []
    hours = [row["start"] for row in found(**{"from": "30d"}, by="hour")["rows"]]
    assert hours == sorted(hours, reverse=True)
    assert len(hours) == 2


def test_a_limit_cuts_rows_and_not_totals() -> None:
    for number in range(3):
        used(f"tenant-{number}")
    body = found(limit="2")
    assert (len(body["rows"]), body["truncated"], body["totals"]["requests"]) == (2, True, 3)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"by": "week"}, "by"),
        ({"group": "region"}, "group"),
        ({"from": "soon"}, "from"),
        ({"from": "2026-13-01"}, "from"),
        ({"from": "1d", "to": "2d"}, "from"),
        ({"from": "2000d"}, "from"),
        ({"from": "999999w"}, "from"),
        ({"class": "urgent"}, "class"),
        ({"limit": "0"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"as": "xml"}, "as"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a\x00"}, "tenant"),
        ({"page_size": "3"}, "page_size"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(query: dict[str, str], field: str) -> None:
    response = bearer().get(USAGE, query)
    assert response.status_code == 400
    assert field in str(response.json())


def table(**query: str) -> list[list[str]]:
    response: Any = bearer().get(USAGE, {"as": "csv", **query}, headers={"accept": "text/csv"})
    assert (response.status_code, response["Content-Type"]) == (200, "text/csv; charset=utf-8")
    assert "attachment" in response["Content-Disposition"]
    text = b"".join(response.streaming_content).decode()
    assert text.endswith("\r\n")
    return list(csv.reader(io.StringIO(text, newline="")))


def test_csv_has_every_row_and_runs_nothing_in_a_spreadsheet() -> None:
    used("rufus", deployment='=cmd|" /C calc"!A0', requests=2, charged=Decimal("1.5"))
    used("~others", deployment="a,b\nc")
    header, *lines = table(group="tenant,deployment", by="hour")
    assert header[:5] == ["start", "tenant", "key", "deployment", "class"]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["deployment"] for row in rows] == ['\'=cmd|" /C calc"!A0', "a,b\nc"]
    assert (rows[0]["requests"], rows[0]["charged_usd"], rows[0]["key"]) == ("2", "1.500000", "")
    assert rows[0]["start"] == f"{this_hour():%Y-%m-%dT%H:%M:%SZ}"


def test_a_long_table_comes_in_pieces() -> None:
    UsageHour.objects.bulk_create(
        UsageHour(tenant=f"tenant-{number:04d}", deployment="sim", hour=this_hour()) for number in range(1500)
    )
    response: Any = bearer().get(USAGE, {"as": "csv"})
    pieces = list(response.streaming_content)
    assert len(pieces) > 3
    assert b"".join(pieces).count(b"\r\n") == 1501


def test_parquet_has_the_same_rows_with_types() -> None:
    from arro3.io import read_parquet

    used("rufus", requests=2, charged=Decimal("1.5"), machine_cost=Decimal("0.25"))
    response: Any = bearer().get(USAGE, {"as": "parquet", "group": "tenant", "by": "day"})
    assert response["Content-Type"] == "application/vnd.apache.parquet"
    body = b"".join(response.streaming_content)
    (row,) = read_parquet(io.BytesIO(body)).read_all().to_struct_array().to_pylist()
    assert (row["tenant"], row["requests"], row["charged_usd"]) == ("rufus", 2, Decimal("1.5"))
    assert (row["machine_cost_usd"], row["start"].date()) == (Decimal("0.25"), this_hour().date())


def test_more_usage_asks_the_database_as_often() -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            found(group="tenant,key", by="day")
        return len(captured)

    used("rufus")
    UsageDay.objects.create(tenant="rufus", day=date(2026, 1, 1))
    queries()  # the first request loads what is then cached
    few = queries()
    for number in range(8):
        used(f"tenant-{number}", f"{number}", back=number)
    assert queries() == few
