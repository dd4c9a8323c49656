"""Alerts become incidents, a stop reaches routing tables, and both are lifted, on PostgreSQL."""

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from engine_agent.protocol.ingress_messages import RoutingTable as TableMessage
from fleet.faults.models import Incident
from fleet.webhooks.models import WebhookDelivery
from fleet.webhooks.services import webhook_create
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.services import key_create, key_rotate
from traffic.routing.models import RoutingTable
from traffic.routing.selectors import table_for_ingresses
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish
from traffic.tenants.selectors import application_of
from traffic.usage.models import Budget, CellHour, UsageHour, UsageMonth
from traffic.usage.services.budgets import budget_change, budget_create, budget_delete, budget_follow, budgets_follow

pytestmark = pytest.mark.django_db


def a_budget(**columns: Any) -> Budget:
    columns = {"tenant": "rufus", "unit": "tokens", "limit": Decimal(1000), "hard_stop": True, **columns}
    return budget_create(actor="ann", now=NOW, **columns)


def used(tokens: int, charged: str = "0", month: date = date(2026, 11, 1)) -> None:
    UsageMonth.objects.update_or_create(
        tenant="rufus", month=month, defaults={"tokens": tokens, "charged": Decimal(charged)}
    )


def incidents() -> list[tuple[str, int]]:
    rows = Incident.objects.filter(kind="budget").order_by("id")
    return [(row.state, row.evidence["reached_percent"]) for row in rows]


def published(now: datetime) -> TableMessage:
    tables_publish(now=now)
    newest = RoutingTable.objects.order_by("-revision").first()
    assert newest is not None
    return table_for_ingresses(newest)


def test_each_alert_opens_one_incident() -> None:
    webhook_create(name="pager", url="https://pager.example.com/x", actor="ann", now=NOW)
    a_budget(hard_stop=False)
    for tokens in (499, 500, 600, 850, 850):
        used(tokens)
        budgets_follow(now=NOW)
    assert incidents() == [("closed", 50), ("open", 80)]
    opened = WebhookDelivery.objects.filter(event="incident.opened")
    assert [each.body["evidence"]["reached_percent"] for each in opened.order_by("id")] == [50, 80]
    assert (
        "tenant rufus (tokens): reached 80 % of its budget: 850 of 1,000 tokens"
        in Incident.objects.get(state="open").summary
    )


def test_an_incident_that_was_dismissed_is_not_opened_again_for_the_same_alert() -> None:
    a_budget(hard_stop=False)
    used(600)
    budgets_follow(now=NOW)
    Incident.objects.update(state="closed")
    used(700)
    assert budgets_follow(now=NOW) == []
    assert incidents() == [("closed", 50)]


def test_a_hard_stop_is_in_the_next_table_and_lifted_by_a_higher_budget() -> None:
    rows.deployment()
    ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    key = key_create(name="k", tenant="rufus", actor="ann", now=NOW)
    row = a_budget()
    assert published(NOW).tenants_over_quota == ()
    used(1000)
    assert budgets_follow(now=NOW) == ["tenant rufus (tokens)"]
    stopped = published(NOW)
    assert stopped.tenants_over_quota == ("rufus",)
    assert application_of(f"Bearer {key.text}", NOW).over_quota
    budget_change(budget_id=row.pk, actor="ann", now=NOW, limit=Decimal(3000))
    assert budgets_follow(now=NOW) == ["tenant rufus (tokens)"]
    lifted = published(NOW)
    assert (lifted.tenants_over_quota, lifted.revision) == ((), stopped.revision + 1)
    assert incidents() == [("closed", 100)]
    assert not application_of(f"Bearer {key.text}", NOW).over_quota


def test_a_new_month_lifts_a_stop_and_closes_the_incident() -> None:
    a_budget()
    used(5000)
    budgets_follow(now=NOW)
    december = datetime(2026, 12, 1, tzinfo=NOW.tzinfo)
    budgets_follow(now=december - timedelta(seconds=1))
    assert Budget.objects.get().stopped
    budgets_follow(now=december)
    row = Budget.objects.get()
    assert (row.stopped, row.level, row.stopped_at, row.month) == (False, 0, None, december.date())
    assert incidents() == [("closed", 100)]


def test_a_tenant_is_stopped_while_one_of_its_budgets_is_used_up() -> None:
    rows.deployment()
    ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    tokens, money = a_budget(), a_budget(unit="usd", limit=Decimal(10))
    used(10, charged="9.999999")
    assert budgets_follow(now=NOW) == ["tenant rufus (usd)"]
    money.refresh_from_db()
    assert (money.level, money.stopped) == (80, False)
    used(1000, charged="10")
    assert budgets_follow(now=NOW) == ["tenant rufus (tokens)", "tenant rufus (usd)"]
    assert published(NOW).tenants_over_quota == ("rufus",)
    budget_delete(budget_id=tokens.pk, actor="ann", now=NOW)
    assert published(NOW).tenants_over_quota == ("rufus",)
    budget_delete(budget_id=money.pk, actor="ann", now=NOW)
    assert published(NOW).tenants_over_quota == ()


def test_a_budget_of_machines_alerts_at_what_they_cost() -> None:
    rows.deployment()
    own = a_budget(tenant="", deployment="sim-70b", unit="usd", limit=Decimal(100), hard_stop=False)
    a_budget(tenant="", unit="usd", limit=Decimal(1000), hard_stop=False)
    for deployment, usd in (("sim-70b", 85), ("", 20)):
        CellHour.objects.create(
            deployment=deployment, instance_type=rows.KIND, hour=NOW - timedelta(hours=1),
            spent=usd * 1_000_000 * 3_600_000,
        )  # fmt: skip
    assert budgets_follow(now=NOW) == ["machines of sim-70b"]
    assert budgets_follow(now=NOW) == []
    assert incidents() == [("open", 80)]
    summary = "machines of sim-70b: reached 80 % of its budget: 85.00 of 100.00 USD"
    assert Incident.objects.get(subject="machines of sim-70b").summary == summary
    budget_change(budget_id=own.pk, actor="ann", now=NOW, limit=Decimal(1000))
    assert budgets_follow(now=NOW) == ["machines of sim-70b"]
    assert incidents() == [("closed", 80)]


def test_a_deleted_budget_stops_no_tenant() -> None:
    row = a_budget()
    used(1000)
    budgets_follow(now=NOW)
    budget_delete(budget_id=row.pk, actor="ann", now=NOW)
    rows.deployment()
    ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    assert published(NOW).tenants_over_quota == ()
    assert incidents() == [("closed", 100)]


def test_a_budget_that_changed_meanwhile_is_compared_again() -> None:
    row = a_budget()
    used(1000)
    stale = Budget.objects.get()
    budget_change(budget_id=row.pk, actor="ann", now=NOW + timedelta(seconds=1), limit=Decimal(9000))
    assert not budget_follow(stale, Decimal(1000), now=NOW)
    assert not Budget.objects.get(pk=row.pk).stopped


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"limit": Decimal(0)}, "limit"),
        ({"limit": Decimal("0.5")}, "limit"),
        ({"alert_at": [80, 50]}, "alert_at"),
        ({"alert_at": [0]}, "alert_at"),
        ({"alert_at": list(range(1, 12))}, "alert_at"),
        ({"deployment": "sim-70b"}, "deployment"),
        ({"tenant": "", "deployment": "nothing", "unit": "usd", "hard_stop": False}, "deployment"),
        ({"tenant": "", "unit": "tokens", "hard_stop": False}, "unit"),
        ({"tenant": "", "unit": "usd", "hard_stop": True}, "hard_stop"),
    ],
)
def test_an_impossible_budget_is_refused(columns: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        a_budget(**columns)
    assert refused.value.field == field
    assert not Budget.objects.exists()


def test_a_tenant_has_one_budget_in_a_unit_and_every_change_is_an_event() -> None:
    row = a_budget()
    with pytest.raises(Conflict):
        a_budget()
    budget_change(budget_id=row.pk, actor="ann", now=NOW, alert_at=[90])
    budget_change(budget_id=row.pk, actor="ann", now=NOW, alert_at=[90])
    kinds = list(Event.objects.filter(kind__startswith="budget.").order_by("id").values_list("kind", flat=True))
    assert kinds == ["budget.created", "budget.changed"]


def spent_by(key: str, charged: str, hour: datetime = NOW) -> None:
    UsageHour.objects.update_or_create(
        tenant="rufus", key=key, hour=hour.replace(minute=0, second=0, microsecond=0),
        defaults={"charged": Decimal(charged), "prompt_tokens": 10},
    )  # fmt: skip


def test_a_key_over_its_spend_limit_is_refused_and_others_of_its_tenant_are_not() -> None:
    key, other = (key_create(name=name, tenant="rufus", actor="ann", now=NOW) for name in ("a", "b"))
    ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    budget = a_budget(tenant="", key=key.key.prefix, unit="usd", limit=Decimal(5))
    spent_by(key.key.prefix, "4.99")
    spent_by(key.key.prefix, "90", NOW - timedelta(days=40))
    spent_by(other.key.prefix, "90")
    budgets_follow(now=NOW)
    assert published(NOW).keys_over_quota == ()
    spent_by(key.key.prefix, "5")
    budgets_follow(now=NOW)
    assert (published(NOW).keys_over_quota, published(NOW).tenants_over_quota) == ((key.key.prefix,), ())
    over = [application_of(f"Bearer {each.text}", NOW).over_quota for each in (key, other)]
    assert over == [True, False]
    assert Incident.objects.filter(kind="budget", state="open").get().evidence["key"] == key.key.prefix
    budget_delete(budget_id=budget.pk, actor="ann", now=NOW)
    assert published(NOW).keys_over_quota == ()


def test_rotated_keys_share_the_budget_and_what_was_spent() -> None:
    rows.deployment()
    ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    first = key_create(name="a", tenant="rufus", actor="ann", now=NOW)
    a_budget(tenant="", key=first.key.prefix, unit="usd", limit=Decimal(5))
    second = key_rotate(prefix=first.key.prefix, actor="ann", now=NOW)
    third = key_rotate(prefix=second.key.prefix, actor="ann", now=NOW)
    spent_by(first.key.prefix, "3")
    spent_by(third.key.prefix, "1.99")
    budgets_follow(now=NOW)
    assert published(NOW).keys_over_quota == ()
    spent_by(second.key.prefix, "0.01")
    budgets_follow(now=NOW)
    line = [new.key.prefix for new in (first, second, third)]
    assert published(NOW).keys_over_quota == tuple(sorted(line))
    assert all(application_of(f"Bearer {new.text}", NOW).over_quota for new in (first, second, third))
    with pytest.raises(Conflict, match="exists already"):
        a_budget(tenant="", key=third.key.prefix, unit="usd", limit=Decimal(50))


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"key": "0a1b2c3d"}, "key"),
        ({"tenant": "", "key": "unknown"}, "key"),
        ({"deployment": "sim-70b"}, "deployment"),
    ],
)
def test_a_budget_has_one_known_subject(columns: dict[str, Any], field: str) -> None:
    rows.deployment()
    with pytest.raises(InvalidInput) as refused:
        a_budget(**columns)
    assert refused.value.field == field
