"""Hourly usage on PostgreSQL."""

from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from engine_agent.protocol.load_messages import Load, UsageRow
from fleet.nodes.models import NodeReport
from fleet.regions.models import Rate
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.models import ApplicationKey
from traffic.keys.services import key_create
from traffic.routing.models import IngressReport
from traffic.routing.services.ingresses import ingress_create
from traffic.usage.models import CostShare, CostShareDay, UsageDay, UsageHour, UsageMark, UsageMonth
from traffic.usage.planning.figures import HOURS_KEPT
from traffic.usage.services.counting import MARKS_KEPT, LeaderRows, usage_count, usage_trim
from traffic.usage.services.day_sums import DAYS_KEPT

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
USED = ("requests", "cancelled", "prompt_tokens", "cached_tokens", "completion_tokens")


def ingress_says(
    totals: dict[str, list[int]], *, since: str = "7@1", where: str = "us-east-1", sent: int = 0, size: int = 0
) -> None:
    gate = ingress_create(region=rows.region(where), address="127.0.0.1", port=8080, now=NOW)
    pools = {"sim-70b": {"requests_total": sent, "bytes_in_total": size, "bytes_out_total": size}}
    telemetry = {"worker_pid": 7, "life": since, "keys": {"since": since, "totals": totals}, "pools": pools}
    IngressReport.objects.update_or_create(ingress=gate, defaults={"telemetry": telemetry})


def cell_says(node: str, *rows: UsageRow) -> None:
    NodeReport.objects.filter(node=node).update(load=msgspec.to_builtins(Load(usage=rows)))


def by_ingresses(**where: Any) -> list[Any]:
    rows = UsageHour.objects.filter(deployment="", **where).order_by("tenant", "key")
    return list(rows.values_list("tenant", "key", "arrived", "limited", "failed"))


def by_cells(**where: Any) -> list[Any]:
    rows = UsageHour.objects.filter(**where).exclude(deployment="").order_by("tenant", "key", "serving_class")
    return list(rows.values_list("tenant", "key", "deployment", "serving_class", *USED))


def a_key(tenant: str = "rufus", **columns: Any) -> str:
    return key_create(name="search", tenant=tenant, actor="ann", now=NOW, **columns).key.prefix


def use(
    key: str, tenant: str = "rufus", serving_class: str = "realtime", since: float = 1.0, **totals: int
) -> UsageRow:
    counts: dict[str, Any] = {f"{name}_total": count for name, count in totals.items()}
    return UsageRow(since, tenant, key, serving_class, **counts)


def test_use_is_counted_by_key_deployment_class_and_hour_and_no_look_counts_twice() -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    ingress_says({key: [10, 2, 1]}, sent=8)
    live = use(key, requests=5, cancelled=1, prompt_tokens=90, cached_tokens=40, completion_tokens=50)
    batch = use(key, serving_class="batch", requests=3, prompt_tokens=10)
    cell_says("n-a", live, batch)
    for _ in range(2):
        usage_count(now=NOW)
    ingress_says({key: [15, 2, 1]}, sent=8)
    usage_count(now=NOW)
    assert by_ingresses() == [("rufus", key, 15, 2, 1)]
    assert by_cells() == [
        ("rufus", key, "sim-70b", "batch", 3, 0, 10, 0, 0),
        ("rufus", key, "sim-70b", "realtime", 5, 1, 90, 40, 50),
    ]
    ingress_says({key: [16, 2, 1]}, sent=8)
    usage_count(now=NOW + timedelta(hours=1))
    assert by_ingresses(hour=NOW + timedelta(hours=1)) == [("rufus", key, 1, 0, 0)]


def test_a_row_that_a_proxy_forgot_begins_anew_and_an_old_report_of_it_counts_no_more() -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    ingress_says({key: [20, 0, 0]}, sent=20)
    old, new = use(key, requests=5, prompt_tokens=50), use(key, since=9.0, requests=1, prompt_tokens=10)
    for told in (old, new, old, new):
        cell_says("n-a", told)
        usage_count(now=NOW)
    assert by_cells() == [("rufus", key, "sim-70b", "realtime", 6, 0, 60, 0, 0)]


def test_only_reports_that_were_written_are_read_again() -> None:
    key = a_key()
    kept = LeaderRows()
    for name in ("a", "b"):
        rows.cell(name, rows.node(f"n-{name}"))
        cell_says(f"n-{name}", use(key, requests=5))
    ingress_says({key: [20, 0, 0]}, sent=20)
    for requests in (5, 6, 8):
        cell_says("n-a", use(key, requests=requests))
        usage_count(now=NOW, leader_rows=kept)
        assert [row[4] for row in by_cells()] == [requests + 5]
    with CaptureQueriesContext(connection) as queries:
        usage_count(now=NOW, leader_rows=kept)
    assert not [each for each in queries.captured_queries if "'usage'" in each["sql"]]
    NodeReport.objects.filter(node="n-a").update(cell="other")
    usage_count(now=NOW, leader_rows=kept)
    cell_says("n-a", use(key, requests=9))
    NodeReport.objects.filter(node="n-a").update(cell="a")
    usage_count(now=NOW, leader_rows=kept)
    assert [row[4] for row in by_cells()] == [14]


def test_requests_without_a_key_have_no_account() -> None:
    rows.cell("c", rows.node("n-a"))
    ingress_says({}, sent=2)
    cell_says("n-a", UsageRow(1.0, requests_total=2, completion_tokens_total=7))
    usage_count(now=NOW)
    assert by_cells() == [("", "", "sim-70b", "realtime", 2, 0, 0, 0, 7)]
    assert not UsageMonth.objects.exists()


def test_what_a_tenant_used_of_a_month_and_what_it_costs_is_written_with_it() -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    for kind, day, value in (
        ("prompt_price", 0, "2"), ("prompt_price", -1, "1"), ("prompt_price", 1, "9"),
        ("cached_price", -1, "0.5"), ("completion_price", -1, "4"),
    ):  # fmt: skip
        at = NOW + timedelta(days=day)
        Rate.objects.create(kind=kind, subject="sim-70b", value=value, valid_from=at, actor="a", created_at=at)
    ingress_says({key: [20, 0, 0]}, sent=20)
    cell_says("n-a", use(key, requests=5, prompt_tokens=50, cached_tokens=10, completion_tokens=3))
    usage_count(now=NOW)
    month = UsageMonth.objects.get()
    assert (month.tenant, month.month, month.tokens) == ("rufus", date(2026, 11, 1), 53)
    assert month.charged == UsageHour.objects.get(deployment="sim-70b").charged == Decimal("0.000097")


BILL = UsageRow(1.0, "rufus", requests_total=2**53, prompt_tokens_total=2**53, completion_tokens_total=2**53)


def test_a_node_that_leads_no_cell_bills_no_tenant() -> None:
    key = a_key()
    leader, follower, spare = (rows.node(name) for name in ("n-leader", "n-follower", "n-spare"))
    rows.cell("c", leader, follower)
    ingress_says({key: [100, 0, 0]}, sent=100)
    usage_count(now=NOW)
    for node in (follower, spare):
        cell_says(node.id, BILL)
    assert usage_count(now=NOW) == 0


def test_reports_about_a_former_cell_bill_no_tenant() -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    ingress_says({key: [100, 0, 0]}, sent=100)
    usage_count(now=NOW)
    cell_says("n-a", BILL)
    NodeReport.objects.update(cell="another")
    assert usage_count(now=NOW) == 0


def test_a_leader_bills_no_more_requests_than_ingresses_sent_and_no_more_tokens_than_they_can_have() -> None:
    key = a_key()
    cell = rows.cell("c", rows.node("n-a"))
    ingress_says({key: [3, 0, 0]}, sent=3, size=1000)
    cell_says("n-a", BILL, UsageRow(1.0, "stranger", requests_total=1))
    for _ in range(2):
        usage_count(now=NOW)
    most = 3 * cell.model_version.context_length + 1000
    assert by_cells() == [("rufus", "", "sim-70b", "realtime", 3, 0, most, 0, most)]


def test_a_leader_bills_a_key_no_more_than_ingresses_counted_for_it() -> None:
    ours, theirs = a_key("rufus"), a_key("other")
    rows.cell("c", rows.node("n-a"))
    ingress_says({ours: [9, 0, 0], theirs: [2, 1, 0]}, sent=10)
    cell_says("n-a", use(theirs, "rufus", requests=10), use(ours, requests=4))
    usage_count(now=NOW)
    assert [row[:5] for row in by_cells()] == [
        ("other", theirs, "sim-70b", "realtime", 1),
        ("rufus", ours, "sim-70b", "realtime", 4),
    ]


def test_a_leader_bills_only_keys_that_open_its_deployment() -> None:
    rows.deployment("smollm2")
    key = a_key("elsewhere", deployments=["smollm2"])
    rows.cell("c", rows.node("n-a"))
    ingress_says({key: [3, 0, 0]}, sent=3)
    usage_count(now=NOW)
    cell_says("n-a", use(key, "elsewhere", requests=3), use("", "elsewhere", requests=3))
    assert usage_count(now=NOW) == 0


def test_what_a_cell_counted_before_its_ingress_reported_counts_with_the_next_report() -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    cell_says("n-a", use(key, requests=5, prompt_tokens=100))
    assert usage_count(now=NOW) == 0
    ingress_says({key: [5, 0, 0]}, sent=5)
    usage_count(now=NOW)
    assert by_cells() == [("rufus", key, "sim-70b", "realtime", 5, 0, 100, 0, 0)]


def test_a_tenant_gets_nothing_of_what_another_used() -> None:
    ours, theirs = a_key("rufus"), a_key("other")
    ingress_says({ours: [3, 0, 0], theirs: [5, 0, 0]})
    usage_count(now=NOW)
    assert [row[:3] for row in by_ingresses(tenant="rufus")] == [("rufus", ours, 3)]
    assert [row[:3] for row in by_ingresses(tenant="other")] == [("other", theirs, 5)]


def test_use_is_shown_at_the_key_and_unknown_keys_are_skipped() -> None:
    key = a_key()
    ingress_says({"ffffffff": [1, 0, 0]})
    assert usage_count(now=NOW) == 0
    ingress_says({key: [1, 0, 0]})
    assert usage_count(now=NOW) == 1
    assert ApplicationKey.objects.get().last_used_at == NOW


def test_several_ingresses_and_a_reloaded_worker_add_up() -> None:
    key = a_key()
    ingress_says({key: [3, 0, 0]})
    ingress_says({key: [4, 0, 0]}, where="us-west-2")
    usage_count(now=NOW)
    ingress_says({key: [2, 0, 0]}, since="9@2")
    usage_count(now=NOW)
    assert by_ingresses() == [("rufus", key, 9, 0, 0)]


def test_old_hours_go_into_their_days_and_old_days_and_marks_are_forgotten() -> None:
    ingress_says({a_key(): [3, 0, 0]})
    usage_count(now=NOW)
    UsageHour.objects.create(
        tenant="rufus", key="", hour=NOW, charged=Decimal("1.5"), machine_cost=Decimal(2), requests=4
    )
    UsageHour.objects.create(tenant="rufus", key="", hour=NOW - timedelta(hours=3), charged=Decimal("0.5"), requests=1)
    usage_trim(now=NOW + HOURS_KEPT)
    assert UsageHour.objects.count() == 3, "the day has not ended"
    for _ in range(2):
        usage_trim(now=NOW + HOURS_KEPT + timedelta(days=1))
    assert not UsageHour.objects.exists()
    day = UsageDay.objects.get(key="")
    assert (day.day, day.requests, day.charged, day.machine_cost) == (NOW.date(), 5, Decimal(2), Decimal(2))
    assert UsageDay.objects.exclude(key="").get().arrived == 3
    usage_trim(now=NOW + DAYS_KEPT + timedelta(days=1))
    assert not UsageDay.objects.exists()


def test_marks_of_what_is_still_reported_are_kept_and_others_forgotten() -> None:
    ingress_says({a_key(): [3, 0, 0]}, since="7@1")
    usage_count(now=NOW)
    ingress_says({a_key(): [3, 0, 0]}, since="8@2")
    later = NOW + MARKS_KEPT - timedelta(days=1)
    usage_count(now=later)
    usage_trim(now=later + timedelta(days=2))
    left = set(UsageMark.objects.filter(subject__startswith="key:", source__startswith="ingress:").values_list("since"))
    assert left == {("8@2",)}


def test_what_an_adapter_used_is_counted_apart_and_one_that_the_version_lacks_is_the_model_s() -> None:
    key = a_key()
    version = rows.version("2", adapters=[{"name": "acme/tuned"}])
    rows.cell("c", rows.node("n-a"), model_version=version)
    ingress_says({key: [9, 0, 0]}, sent=9)
    told = [
        msgspec.structs.replace(use(key, requests=count, prompt_tokens=10 * count), adapter=adapter)
        for count, adapter in ((1, ""), (2, "acme/tuned"), (3, "invented"))
    ]
    for _ in range(2):
        cell_says("n-a", *told)
        usage_count(now=NOW)
    counted = UsageHour.objects.exclude(deployment="").order_by("adapter")
    assert list(counted.values_list("key", "adapter", "requests", "prompt_tokens")) == [
        (key, "", 4, 40),
        (key, "acme/tuned", 2, 20),
    ]
    usage_trim(now=NOW + HOURS_KEPT + timedelta(days=1))
    assert sorted(UsageDay.objects.exclude(deployment="").values_list("adapter", "requests")) == [
        ("", 4),
        ("acme/tuned", 2),
    ]


@pytest.mark.parametrize("adapter", [7, "a b", "x" * 65, None])
def test_a_row_of_an_invalid_adapter_is_ignored(adapter: Any) -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    ingress_says({key: [9, 0, 0]}, sent=9)
    load = msgspec.to_builtins(Load(usage=(use(key, requests=1), use(key, requests=2))))
    load["usage"][1]["adapter"] = adapter
    NodeReport.objects.filter(node="n-a").update(load=load)
    usage_count(now=NOW)
    assert [row[4] for row in by_cells()] == [1]


def test_shares_of_costs_that_are_old_are_added_to_their_days() -> None:
    old = NOW - timedelta(days=95)
    place = {"deployment": "sim-70b", "version": "sim-70b@1", "region": "r", "instance_type": "t", "tenant": "rufus"}
    for hours, source in ((0, 0), (1, 2), (12, 0)):
        CostShare.objects.create(
            **place, hour=old.replace(hour=hours), completion_tokens=5, cost=Decimal("0.5"), energy_uj=3,
            energy_source=source,
        )  # fmt: skip
    CostShare.objects.create(**place, hour=NOW, completion_tokens=7)
    for _ in range(2):
        usage_trim(now=NOW)
    assert CostShare.objects.get().completion_tokens == 7
    day = CostShareDay.objects.get()
    assert (day.day, day.completion_tokens, day.cost, day.energy_uj, day.energy_source) == (
        old.date(), 15, Decimal("1.5"), 9, 2,
    )  # fmt: skip


def test_tokens_are_counted_by_the_machines_that_made_them_too_each_once() -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    rows.cell("d", rows.node("n-b"), model_version=rows.version("2"))
    ingress_says({key: [10, 0, 0]}, sent=10)
    cell_says("n-a", use(key, requests=2, prompt_tokens=90, cached_tokens=40, completion_tokens=50))
    cell_says("n-b", use(key, requests=1, prompt_tokens=10, completion_tokens=3), use(key, serving_class="batch"))
    for _ in range(2):
        usage_count(now=NOW)
    columns = ("version", "region", "instance_type", "tenant", "key", "serving_class", "prompt_tokens", "cached_tokens")
    assert list(CostShare.objects.order_by("version").values_list(*columns, "completion_tokens")) == [
        ("sim-70b@1", "us-east-1", rows.KIND, "rufus", key, "realtime", 90, 40, 50),
        ("sim-70b@2", "us-east-1", rows.KIND, "rufus", key, "realtime", 10, 0, 3),
    ]
    (used,) = by_cells()
    assert used[-3:] == (100, 40, 53)
