"""What-if over HTTP."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.models import Cell, DeploymentRegion, Rollout
from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.fleet import rows

pytestmark = pytest.mark.django_db

URL = "/api/v1/plan"


def plan(body: dict[str, Any], username: str = "operator") -> Any:
    return bearer(username).post(URL, body, format="json")


@pytest.fixture
def cell_in_service(monkeypatch: pytest.MonkeyPatch) -> Cell:
    monkeypatch.setattr("kernel.clock.now", lambda: rows.NOW)
    row = rows.cell("sim-70b-us-east-1-1", rows.node("n-1"), rows.node("n-2"))
    for kind, at in (("cell.starting", 0), ("cell.ready", 12)):
        Event.objects.create(
            at=rows.NOW - timedelta(seconds=60 - at), kind=kind, message="m", cell=row.id, deployment="sim-70b"
        )
    return row


def test_a_scaling_is_predicted_and_nothing_is_done(cell_in_service: Cell) -> None:
    rows.node("n-3")
    rows.node("n-4")

    answer = plan({"scale": {"deployment": "sim-70b", "regions": [{"region": "us-east-1", "cells": 2}]}})

    assert answer.status_code == 200, answer.json()
    found = answer.json()
    assert found["places"] == [
        {
            "deployment": "sim-70b",
            "region": "us-east-1",
            "wanted": 2,
            "ready_now": 1,
            "ready_least": 1,
            "ready_then": 2,
        }
    ]
    assert 12.0 < found["took_s"] < 30.0
    assert Cell.objects.count() == 1


def test_a_rollout_is_predicted_by_the_rules_for_starting_it(cell_in_service: Cell) -> None:
    rows.version("2", state="released")
    rows.cell("sim-70b-us-east-1-2", rows.node("n-3"), rows.node("n-4"))
    DeploymentRegion.objects.update(cells=2)

    answer = plan({"rollout": {"deployment": "sim-70b", "version": "sim-70b@2", "policy": {"canary_bake_s": 1}}})

    assert answer.status_code == 200, answer.json()
    assert not Rollout.objects.exists()
    refused = plan({"rollout": {"deployment": "sim-70b", "version": "sim-70b@9"}})
    assert refused.status_code == 400
    assert "there is no model version 'sim-70b@9'" in refused.content.decode()


def test_the_loss_of_a_region_is_predicted(cell_in_service: Cell) -> None:
    answer = plan({"lose_region": "us-east-1"})

    assert answer.status_code == 200
    assert answer.json()["places"][0]["ready_least"] == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "give one of rollout, scale, lose_region; got 0"),
        ({"lose_region": "us-east-1", "scale": {"deployment": "a", "regions": []}}, "regions"),
        ({"lose_region": "mars"}, "there is no region 'mars'"),
        (
            {"scale": {"deployment": "b", "regions": [{"region": "us-east-1", "cells": 1}]}},
            "there is no deployment 'b'",
        ),
        ({"loose_region": "us-east-1"}, "unknown field"),
    ],
)
def test_a_wrong_question_says_what_would_be_right(cell_in_service: Cell, body: dict[str, Any], says: str) -> None:
    answer = plan(body)

    assert answer.status_code == 400
    assert says in answer.content.decode()


def test_nobody_asks_without_a_token(client: Any) -> None:
    assert client.post(URL, {}, content_type="application/json").status_code in {401, 403}
