"""Rates over HTTP: valid values, and an unchanged history."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.regions.models import Rate
from kernel import clock
from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
RATES = "/api/v1/rates"
RATE = {"kind": "machine_price", "subject": rows.KIND, "value": "0.04"}


def post(path: str, **body: Any) -> Any:
    return bearer().post(path, body, format="json")


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
        ({"market": "flea"}, "market"),
        ({"kind": "prompt_price"}, "subject"),
        ({"kind": "prompt_price", "subject": "sim-70b", "region": "us-east-1"}, "region"),
        ({"kind": "pue", "subject": "us-east-1", "value": "1.2", "market": "spot"}, "market"),
    ],
)
def test_a_rate_that_cannot_be_meant_is_refused_by_its_field(wrong: dict[str, str], field: str) -> None:
    rows.deployment()
    response = post(RATES, **{**RATE, **wrong})
    assert response.status_code == 400, response.content
    assert field in str(response.json())
    assert not Rate.objects.exists()
