"""Budgets of machines over HTTP: what may be stated, and that they alert."""

from typing import Any

import pytest

from fleet.models import Incident, InstanceType
from kernel import clock
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from traffic.models import CellHour, CostBudget
from traffic.services.cost_budget import cost_budgets_follow

pytestmark = pytest.mark.django_db
BUDGETS = "/api/v1/cost-budgets"


def post(path: str, **body: Any) -> Any:
    return bearer().post(path, body, format="json")


def spent(usd: int, deployment: str = "sim-70b") -> None:
    hour = clock.now().replace(minute=0, second=0, microsecond=0)
    columns: dict[str, Any] = {"instance_type": rows.KIND, "hour": hour}
    CellHour.objects.update_or_create(deployment=deployment, **columns, defaults={"spent": usd * 1_000_000 * 3_600_000})


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
