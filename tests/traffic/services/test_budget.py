"""Budgets over real PostgreSQL: thresholds become incidents, a stop reaches the routing tables, and both are lifted."""

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from engine_agent.protocol.ingress_messages import RoutingTable as TableMessage
from fleet.models import Incident, WebhookDelivery
from fleet.services.webhook import webhook_create
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.models import Budget, RoutingTable, UsageMonth
from traffic.planning.budget import MonthUse
from traffic.selectors.application import application_of
from traffic.selectors.routing import table_for_ingresses
from traffic.services.budget import OF_TENANTS, budget_change, budget_create, budget_delete, budgets_follow
from traffic.services.ingress import ingress_create
from traffic.services.key import key_create
from traffic.services.routing import tables_publish
from traffic.services.threshold import budget_follow

pytestmark = pytest.mark.django_db


def a_budget(**columns: Any) -> Budget:
    columns = {"tokens_per_month": 1000, "hard_stop": True, **columns}
    return budget_create(tenant="rufus", actor="ann", now=NOW, **columns)


def used(tokens: int, charged: str = "0", month: date = date(2026, 11, 1)) -> None:
    UsageMonth.objects.update_or_create(
        tenant="rufus", month=month, defaults={"tokens": tokens, "charged": Decimal(charged)}
    )


def incidents() -> list[tuple[str, int]]:
    rows = Incident.objects.filter(kind="tenant-budget").order_by("id")
    return [(row.state, row.evidence["threshold_percent"]) for row in rows]


def published(now: datetime) -> TableMessage:
    tables_publish(now=now)
    newest = RoutingTable.objects.order_by("-revision").first()
    assert newest is not None
    return table_for_ingresses(newest)


def test_each_threshold_is_an_incident_of_its_own_and_is_told_once() -> None:
    webhook_create(name="pager", url="https://pager.example.com/x", actor="ann", now=NOW)
    a_budget(hard_stop=False)
    for tokens in (499, 500, 600, 850, 850):
        used(tokens)
        budgets_follow(now=NOW)
    assert incidents() == [("closed", 50), ("open", 80)]
    opened = WebhookDelivery.objects.filter(event="incident.opened")
    assert [each.body["evidence"]["threshold_percent"] for each in opened.order_by("id")] == [50, 80]
    assert "rufus reached 80 % of its budget: 850 of 1,000 tokens" in Incident.objects.get(state="open").summary


def test_an_incident_that_was_dismissed_is_not_opened_again_for_the_same_threshold() -> None:
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
    a_budget()
    assert published(NOW).tenants_over_quota == ()
    used(1000)
    assert budgets_follow(now=NOW) == ["rufus"]
    stopped = published(NOW)
    assert stopped.tenants_over_quota == ("rufus",)
    assert application_of(f"Bearer {key.text}", NOW).over_quota
    budget_change(tenant="rufus", actor="ann", now=NOW, tokens_per_month=3000)
    assert budgets_follow(now=NOW) == ["rufus"]
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


def test_money_counts_like_tokens_and_the_nearer_limit_decides() -> None:
    a_budget(money_per_month=Decimal("10"))
    used(10, charged="9.999999")
    budgets_follow(now=NOW)
    assert (Budget.objects.get().level, Budget.objects.get().stopped) == (80, False)
    used(10, charged="10")
    budgets_follow(now=NOW)
    assert Budget.objects.get().stopped


def test_a_budget_that_is_removed_stops_nobody() -> None:
    a_budget()
    used(1000)
    budgets_follow(now=NOW)
    budget_delete(tenant="rufus", actor="ann", now=NOW)
    rows.deployment()
    ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    assert published(NOW).tenants_over_quota == ()
    assert incidents() == [("closed", 100)]


def test_what_somebody_changed_meanwhile_is_looked_at_again() -> None:
    row = a_budget()
    used(1000)
    stale = Budget.objects.get()
    budget_change(tenant="rufus", actor="ann", now=NOW + timedelta(seconds=1), tokens_per_month=9000)
    assert not budget_follow(OF_TENANTS, stale, MonthUse(1000), now=NOW)
    assert not Budget.objects.get(pk=row.pk).stopped


@pytest.mark.parametrize(
    "columns",
    [
        {"tokens_per_month": None},
        {"tokens_per_month": None, "money_per_month": Decimal(0)},
        {"thresholds": [80, 50]},
        {"thresholds": [0]},
        {"thresholds": list(range(1, 12))},
    ],
)
def test_what_no_budget_can_be_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        a_budget(**columns)
    assert not Budget.objects.exists()


def test_a_tenant_has_one_budget_and_every_change_is_an_event() -> None:
    a_budget()
    with pytest.raises(Conflict):
        a_budget()
    budget_change(tenant="rufus", actor="ann", now=NOW, thresholds=[90])
    budget_change(tenant="rufus", actor="ann", now=NOW, thresholds=[90])
    kinds = list(Event.objects.filter(kind__startswith="budget.").order_by("id").values_list("kind", flat=True))
    assert kinds == ["budget.created", "budget.changed"]
