"""Rates and budgets of machines over HTTP: what may be stated, that history stays, and that a budget alerts."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.models import Incident, InstanceType
from kernel import clock
from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from traffic.models import CellHour, CostBudget, Rate
from traffic.services.cost_budget import cost_budgets_follow

pytestmark = pytest.mark.django_db
RATES, BUDGETS = "/api/v1/rates", "/api/v1/cost-budgets"
RATE = {"kind": "machine_price", "subject": rows.KIND, "value": "0.04"}


def post(path: str, **body: Any) -> Any:
    return bearer().post(path, body, format="json")


def spent(usd: int, deployment: str = "sim-70b") -> None:
    hour = clock.now().replace(minute=0, second=0, microsecond=0)
    columns: dict[str, Any] = {"instance_type": rows.KIND, "hour": hour}
    CellHour.objects.update_or_create(deployment=deployment, **columns, defaults={"spent": usd * 1_000_000 * 3_600_000})


def test_a_rate_is_stated_from_now_on_and_a_later_one_takes_its_place() -> None:
    rows.deployment()
    first = post(RATES, **RATE).json()
    assert (first["value"], first["region"], first["in_force"]) == ("0.040000", "", True)
    there = post(RATES, **RATE, region="us-east-1").json()
    assert there["in_force"] is True
    later = post(RATES, **RATE, valid_from=(clock.now() + timedelta(days=1)).isoformat()).json()
    assert later["in_force"] is False
    assert bearer().delete(f"{RATES}/{first['id']}").status_code == 409
    assert bearer().delete(f"{RATES}/{later['id']}").status_code == 200
    kinds = Event.objects.filter(kind__startswith="rate.").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["rate.set", "rate.set", "rate.set", "rate.withdrawn"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"kind": "colour"}, "kind"),
        ({"subject": "nothing"}, "subject"),
        ({"region": "nowhere"}, "region"),
        ({"value": "-1"}, "value"),
        ({"value": "100001"}, "value"),
        ({"value": "NaN"}, "value"),
        ({"valid_from": "2020-01-01T00:00:00Z"}, "valid_from"),
        ({"kind": "pue", "subject": "us-east-1", "value": "0.9"}, "value"),
        ({"kind": "pue", "subject": "us-east-1", "value": "1.2", "region": "us-east-1"}, "region"),
        ({"currency": "EUR"}, "currency"),
    ],
)
def test_a_rate_that_cannot_be_meant_is_refused_by_its_field(wrong: dict[str, str], field: str) -> None:
    rows.deployment()
    response = post(RATES, **{**RATE, **wrong})
    assert response.status_code == 400, response.content
    assert field in str(response.json())
    assert not Rate.objects.exists()


def test_a_budget_of_machines_opens_an_incident_at_each_threshold_and_closes_it_when_it_is_raised() -> None:
    rows.deployment()
    InstanceType.objects.get_or_create(name=rows.KIND, defaults={"accelerator": "cpu"})
    own = post(BUDGETS, deployment="sim-70b", money_per_month="100").json()
    fleet = post(BUDGETS, deployment="", money_per_month="1000").json()
    assert post(BUDGETS, money_per_month="1").status_code == 409
    assert post(BUDGETS, deployment="sim-70b", money_per_month="1").status_code == 409
    spent(85)
    spent(20, deployment="")
    assert cost_budgets_follow(now=clock.now()) == ["sim-70b"]
    assert cost_budgets_follow(now=clock.now()) == []
    (incident,) = Incident.objects.filter(kind="cost-budget")
    assert (incident.subject, incident.evidence["threshold_percent"]) == ("sim-70b", 80)
    assert "85.00 of 100.00 USD" in incident.summary
    used = {row["id"]: (row["used_usd"], row["used_percent"]) for row in bearer().get(BUDGETS).json()["results"]}
    assert used == {own["id"]: ("85.000000", 85.0), fleet["id"]: ("105.000000", 10.5)}
    bearer().patch(f"{BUDGETS}/{own['id']}", {"money_per_month": "1000"}, format="json")
    assert cost_budgets_follow(now=clock.now()) == ["sim-70b"]
    incident.refresh_from_db()
    assert incident.state == "closed"


def test_a_new_month_begins_at_nothing() -> None:
    row = CostBudget.objects.create(
        deployment="", money_per_month=10, actor="a", changed_at=clock.now(), month="2020-01-01", level=100
    )
    assert cost_budgets_follow(now=clock.now()) == ["the fleet"]
    row.refresh_from_db()
    assert row.level == 0


@pytest.mark.parametrize(
    "wrong", [{"money_per_month": "0"}, {"deployment": "nothing"}, {"thresholds": [80, 50]}, {"hard_stop": True}]
)
def test_a_budget_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    rows.deployment()
    response = post(BUDGETS, **{"deployment": "sim-70b", "money_per_month": "100", **wrong})
    assert response.status_code == 400
    assert next(iter(wrong)) in str(response.json())
    assert not CostBudget.objects.exists()


def test_a_budget_that_is_removed_takes_its_incident_with_it() -> None:
    rows.deployment()
    own = post(BUDGETS, deployment="sim-70b", money_per_month="1").json()
    spent(5)
    cost_budgets_follow(now=clock.now())
    assert bearer().delete(f"{BUDGETS}/{own['id']}").status_code == 200
    assert not Incident.objects.filter(kind="cost-budget", state="open").exists()
