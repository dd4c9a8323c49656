import pytest

from tests.controlplane.api.client import bearer
from tests.traffic.rows import EAST, forecast_row
from traffic.demand.models import DemandForecast

pytestmark = pytest.mark.django_db

LEDGER = {
    "chosen": ["blend", "last"],
    "scores": {"blend": [{"count": 40, "wape": 0.1, "held": 0.9, "factors": [1.2, 1.4]}] * 2, "last": []},
}


def test_a_forecast_has_its_slots_and_the_errors_of_each_method() -> None:
    forecast_row()
    DemandForecast.objects.update(ledger=LEDGER)

    (found,) = bearer().get("/api/v1/forecasts", {"deployment": "sim-70b"}).json()["results"]

    assert (found["origin"], found["serving_class"], found["is_judged"]) == (EAST, "realtime", True)
    assert (found["p50"][0], found["p90"][95], found["slot_s"]) == (30.0, 36.0, 900)
    blend = {"method": "blend", "judged": 40, "wape": 0.1, "p90_held": 0.9}
    assert found["horizons"] == [
        {"horizon_s": 900, "chosen": True, **blend},
        {"horizon_s": 1800, "chosen": False, **blend},
    ]
    assert bearer().get(f"/api/v1/forecasts/{found['id']}").json() == found


def test_forecasts_are_found_by_whose_they_are() -> None:
    forecast_row()

    for name, value, count in (("serving_class", "batch", 0), ("origin", EAST, 1), ("deployment", "other", 0)):
        assert len(bearer().get("/api/v1/forecasts", {name: value}).json()["results"]) == count
