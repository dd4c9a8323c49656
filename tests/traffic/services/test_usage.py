"""Usage by the hour, over real PostgreSQL."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from engine_agent.protocol.messages import Load, TenantLoad, UsageRow
from fleet.models import NodeReport
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.models import ApplicationKey, IngressReport, UsageHour, UsageMark
from traffic.services.ingress import ingress_create
from traffic.services.key import key_create
from traffic.services.usage import HOURS_KEPT, MARKS_KEPT, usage_count, usage_trim

pytestmark = pytest.mark.django_db


def ingress_says(totals: dict[str, list[int]], *, since: str = "7@1", where: str = "us-east-1", sent: int = 0) -> None:
    gate = ingress_create(region=rows.region(where), address="127.0.0.1", port=8080, now=NOW)
    pools = {"sim-70b": {"requests_total": sent}}
    telemetry = {"worker_pid": 7, "keys": {"since": since, "totals": totals}, "pools": pools}
    IngressReport.objects.update_or_create(ingress=gate, defaults={"telemetry": telemetry})


def cell_says(node: str, *rows: UsageRow, **tenants: TenantLoad) -> None:
    NodeReport.objects.filter(node=node).update(load=msgspec.to_builtins(Load(usage=rows, tenants=tenants)))


def counted(**where: Any) -> list[Any]:
    named = ("tenant", "key", "requests", "limited", "errors", "prompt_tokens", "completion_tokens")
    return list(UsageHour.objects.filter(**where).order_by("tenant", "key").values_list(*named))


def a_key(tenant: str = "rufus") -> str:
    return key_create(name="search", tenant=tenant, actor="ann", now=NOW).key.prefix


def test_keys_and_tenants_add_up_by_the_hour_and_no_look_counts_twice() -> None:
    key = a_key()
    rows.cell("c", rows.node("n-a"))
    ingress_says({key: [10, 2, 1]}, sent=8)
    cell_says("n-a", rufus=TenantLoad(1.0, requests_total=8, prompt_tokens_total=100, completion_tokens_total=50))
    for _ in range(2):
        usage_count(now=NOW)
    ingress_says({key: [15, 2, 1]}, sent=8)
    usage_count(now=NOW)
    assert counted() == [("rufus", "", 8, 0, 0, 100, 50), ("rufus", key, 15, 2, 1, 0, 0)]
    ingress_says({key: [16, 2, 1]}, sent=8)
    usage_count(now=NOW + timedelta(hours=1))
    assert counted(hour=NOW + timedelta(hours=1)) == [("rufus", key, 1, 0, 0, 0, 0)]


def test_rows_of_keys_and_classes_add_up_and_one_that_was_forgotten_begins_anew() -> None:
    a_key()
    rows.cell("c", rows.node("n-a"))
    ingress_says({}, sent=20)
    batch = UsageRow(1.0, "rufus", "0a", "batch", requests_total=2, prompt_tokens_total=20)
    cell_says("n-a", batch, UsageRow(1.0, "rufus", "0a", requests_total=5, prompt_tokens_total=50))
    usage_count(now=NOW)
    cell_says("n-a", batch, UsageRow(9.0, "rufus", "0a", requests_total=1, prompt_tokens_total=10))
    usage_count(now=NOW)
    assert counted() == [("rufus", "", 8, 0, 0, 80, 0)]


BILL = {"rufus": TenantLoad(1.0, requests_total=2**53, prompt_tokens_total=2**53, completion_tokens_total=2**53)}


def test_a_node_that_leads_no_cell_bills_nobody() -> None:
    a_key()
    leader, follower, spare = (rows.node(name) for name in ("n-leader", "n-follower", "n-spare"))
    rows.cell("c", leader, follower)
    ingress_says({}, sent=100)
    for node in (follower, spare):
        cell_says(node.id, **BILL)
    assert usage_count(now=NOW) == 0


def test_a_leader_bills_no_more_requests_than_ingresses_sent_and_no_more_tokens_than_they_can_have() -> None:
    a_key()
    cell = rows.cell("c", rows.node("n-a"))
    ingress_says({}, sent=3)
    cell_says("n-a", **BILL, stranger=TenantLoad(1.0, requests_total=1))
    for _ in range(2):
        usage_count(now=NOW)
    most = 3 * cell.model_version.context_length
    assert counted() == [("rufus", "", 3, 0, 0, most, most)]


def test_a_leader_bills_only_tenants_that_may_use_its_deployment() -> None:
    rows.deployment("smollm2")
    key_create(name="k", tenant="elsewhere", deployments=["smollm2"], actor="ann", now=NOW)
    rows.cell("c", rows.node("n-a"))
    ingress_says({}, sent=3)
    cell_says("n-a", elsewhere=TenantLoad(1.0, requests_total=3))
    assert usage_count(now=NOW) == 0


def test_what_a_cell_counted_before_its_ingress_reported_counts_with_the_next_report() -> None:
    a_key()
    rows.cell("c", rows.node("n-a"))
    cell_says("n-a", rufus=TenantLoad(1.0, requests_total=5, prompt_tokens_total=100))
    assert usage_count(now=NOW) == 0
    ingress_says({}, sent=5)
    usage_count(now=NOW)
    assert counted() == [("rufus", "", 5, 0, 0, 100, 0)]


def test_a_tenant_gets_nothing_of_what_another_used() -> None:
    ours, theirs = a_key("rufus"), a_key("other")
    ingress_says({ours: [3, 0, 0], theirs: [5, 0, 0]})
    usage_count(now=NOW)
    assert [row[:3] for row in counted(tenant="rufus")] == [("rufus", ours, 3)]
    assert [row[:3] for row in counted(tenant="other")] == [("other", theirs, 5)]


def test_use_is_seen_at_the_key_and_a_key_that_nobody_knows_is_passed_over() -> None:
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
    assert counted() == [("rufus", key, 9, 0, 0, 0, 0)]


def test_old_hours_and_marks_are_forgotten() -> None:
    ingress_says({a_key(): [3, 0, 0]})
    usage_count(now=NOW)
    usage_trim(now=NOW + MARKS_KEPT - timedelta(days=1))
    assert (UsageHour.objects.count(), UsageMark.objects.count()) == (1, 1)
    usage_trim(now=NOW + HOURS_KEPT + timedelta(days=1))
    assert (UsageHour.objects.count(), UsageMark.objects.count()) == (0, 0)
