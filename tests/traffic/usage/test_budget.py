"""Budgets over HTTP: validation and use."""

from typing import Any

import pytest

from kernel import clock
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from traffic.usage.models import CellHour, UsageMonth
from traffic.usage.planning.counting import month_of

pytestmark = pytest.mark.django_db
BUDGETS = "/api/v1/budgets"


def post(path: str, **body: Any) -> Any:
    return bearer().post(path, body, format="json")


def test_a_budget_shows_what_was_used_of_this_month() -> None:
    UsageMonth.objects.create(tenant="rufus", month=month_of(clock.now()), tokens=250, charged="1.5")
    money = post(BUDGETS, tenant="rufus", unit="usd", limit="3").json()
    assert (money["used"], money["used_percent"], money["alert_at"]) == ("1.500000", 50.0, [50, 80, 100])
    tokens = post(BUDGETS, tenant="rufus", unit="tokens", limit=1000).json()
    assert (tokens["used"], tokens["used_percent"]) == ("250.000000", 25.0)
    assert post(BUDGETS, tenant="rufus", unit="tokens", limit=1).status_code == 409
    one = f"{BUDGETS}/{tokens['id']}"
    changed = bearer().patch(one, {"limit": "500", "hard_stop": True}, format="json").json()
    assert (changed["limit"], changed["used_percent"], changed["hard_stop"]) == ("500.000000", 50.0, True)
    assert bearer().get(f"{BUDGETS}?stopped=true").json()["results"] == []
    assert bearer().delete(one).status_code == 200
    assert bearer().get(one).status_code == 404
    assert [row["unit"] for row in bearer().get(f"{BUDGETS}?tenant=rufus").json()["results"]] == ["usd"]


def test_the_budget_of_the_fleet_counts_all_machines() -> None:
    rows.deployment()
    hour = clock.now().replace(minute=0, second=0, microsecond=0)
    for deployment, usd in (("sim-70b", 85), ("", 20)):
        spent = usd * 1_000_000 * 3_600_000
        CellHour.objects.create(deployment=deployment, instance_type=rows.KIND, hour=hour, spent=spent)
    for whose in ({"deployment": "sim-70b"}, {}):
        assert post(BUDGETS, unit="usd", limit="1000", **whose).status_code == 200
        assert post(BUDGETS, unit="usd", limit="1", **whose).status_code == 409
    used = {row["deployment"]: row["used"] for row in bearer().get(BUDGETS).json()["results"]}
    assert used == {"sim-70b": "85.000000", "": "105.000000"}


@pytest.mark.parametrize(
    "wrong",
    [{"limit": 0}, {"limit": "NaN"}, {"unit": "eur"}, {"alert_at": [80, 50]}, {"tenant": "a b"}, {"limit": None}],
)
def test_a_budget_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    response = post(BUDGETS, **{"tenant": "rufus", "unit": "usd", "limit": 5, **wrong})
    assert response.status_code == 400
    assert next(iter(wrong)) in str(response.json())
