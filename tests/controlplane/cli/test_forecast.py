"""Forecasts on the command line."""

import json

import pytest

from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows
from tests.traffic.rows import forecast_row
from traffic.demand.models import DemandForecast

pytestmark = pytest.mark.django_db


def test_what_is_expected_stands_beside_the_errors(switchyard: Switchyard) -> None:
    forecast_row()
    scores = {"blend": [{"count": 40, "wape": 0.1, "held": 0.925, "factors": [1.2, 1.4]}]}
    DemandForecast.objects.update(ledger={"chosen": ["blend"], "scores": scores})

    said = switchyard("forecast", "sim-70b")

    assert said.out.splitlines()[1].split() == [
        "us-east-1", "realtime", "11-26", "12:15", "30", "36", "blend", "10", "92.5"
    ]  # fmt: skip


def test_before_there_are_errors_the_next_slot_is_shown(switchyard: Switchyard) -> None:
    forecast_row(judged=False)

    assert "blend" in switchyard("forecast", "sim-70b").out
    (found,) = json.loads(switchyard("forecast", "sim-70b", "-o", "json").out)
    assert found["methods"][0] == "blend"


def test_where_nothing_is_forecast_it_says_what_would(switchyard: Switchyard) -> None:
    rows.deployment()

    assert "process `controller`" in switchyard("forecast", "sim-70b").err
