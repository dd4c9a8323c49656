"""Prices and budgets over HTTP: what may be set, and that history stays."""

from datetime import timedelta
from typing import Any

import pytest

from kernel import clock
from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from traffic.models import TokenPrice, UsageMonth
from traffic.planning.budget import month_of

pytestmark = pytest.mark.django_db
PRICES, BUDGETS = "/api/v1/prices", "/api/v1/budgets"


def post(path: str, **body: Any) -> Any:
    return bearer().post(path, body, format="json")


def test_a_price_is_set_from_now_on_and_a_later_one_takes_its_place_while_the_first_stays() -> None:
    rows.deployment()
    first = post(PRICES, deployment="sim-70b", prompt="0.6", completion="1.8").json()
    assert (first["cached"], first["in_force"]) == ("0.600000", True)
    later = post(
        PRICES, deployment="sim-70b", prompt="1", completion="2", cached="0",
        valid_from=(clock.now() + timedelta(days=1)).isoformat(),
    ).json()  # fmt: skip
    assert (later["cached"], later["in_force"]) == ("0.000000", False)
    assert [row["in_force"] for row in bearer().get(PRICES).json()["results"]] == [False, True]
    assert bearer().delete(f"{PRICES}/{first['id']}").status_code == 409
    assert bearer().delete(f"{PRICES}/{later['id']}").status_code == 200
    kinds = Event.objects.filter(kind__startswith="price.").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["price.set", "price.set", "price.withdrawn"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"deployment": "nothing"},
        {"prompt": "-1"},
        {"prompt": "0.0000001"},
        {"prompt": "NaN"},
        {"valid_from": "2020-01-01T00:00:00Z"},
        {"currency": "EUR"},
    ],
)
def test_a_price_that_cannot_be_meant_is_refused(wrong: dict[str, str]) -> None:
    rows.deployment()
    response = post(PRICES, **{"deployment": "sim-70b", "prompt": "1", "completion": "1", **wrong})
    assert response.status_code == 400
    assert next(iter(wrong)) in str(response.json())
    assert not TokenPrice.objects.exists()


def test_a_budget_shows_what_was_used_of_this_month() -> None:
    UsageMonth.objects.create(tenant="rufus", month=month_of(clock.now()), tokens=250, charged="1.5")
    made = post(BUDGETS, tenant="rufus", tokens_per_month=1000, money_per_month="3").json()
    assert (made["used_tokens"], made["used_money"], made["used_percent"]) == (250, "1.500000", 50.0)
    assert made["thresholds"] == [50, 80, 100]
    assert post(BUDGETS, tenant="rufus", tokens_per_month=1).status_code == 409
    changed = bearer().patch(f"{BUDGETS}/rufus", {"money_per_month": None, "hard_stop": True}, format="json").json()
    assert (changed["money_per_month"], changed["used_percent"], changed["hard_stop"]) == (None, 25.0, True)
    assert bearer().get(f"{BUDGETS}?stopped=true").json()["results"] == []
    assert bearer().delete(f"{BUDGETS}/rufus").status_code == 200
    assert bearer().get(f"{BUDGETS}/rufus").status_code == 404


@pytest.mark.parametrize(
    "wrong",
    [{"tokens_per_month": 0}, {"money_per_month": "-2"}, {"thresholds": [80, 50]}, {"tenant": "a b"}, {}],
)
def test_a_budget_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    given = {"tenant": "rufus", **({"tokens_per_month": 5} if "thresholds" in wrong else {}), **wrong}
    assert post(BUDGETS, **given).status_code == 400
