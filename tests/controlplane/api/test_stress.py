"""More load and lost regions over HTTP: of the present fleet, and of the fleet after documents or a draft."""

from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from controlplane.forecast_budget import ForecastBudget, ForecastLimits
from fleet.deployments.models import DeploymentRegion
from fleet.drafts.services import draft_create
from kernel.access import Role
from models_registry.versions.models import ModelVersion
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.traffic.rows import EAST, MADE, forecast_row

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

WEST, NOW = "us-west-2", MADE + timedelta(seconds=20)


@pytest.fixture(autouse=True)
def _two_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells for 64 requests in each region, and 90 requests in the east."""
    monkeypatch.setattr("kernel.clock.now", lambda: NOW)
    for where in (EAST, WEST):
        rows.deployment(cells=2, where=where)
    ModelVersion.objects.update(max_concurrency=64)
    forecast_row(75)


def cells(west: int) -> dict[str, Any]:
    spec = {"regions": [{"region": WEST, "cells": west}]}
    return {"apiVersion": "switchyard/v1", "kind": "Deployment", "metadata": {"name": "sim-70b"}, "spec": spec}


def asked(**body: Any) -> Any:
    return bearer().post("/api/v1/what-if", body, format="json")


def test_the_present_fleet_says_what_breaks_where_and_when() -> None:
    answer = asked(lost=[EAST], factor=1.5).json()
    (row,) = answer["deployments"]
    assert (row["breaks"], row["first_region"], row["held_until"]) == (True, EAST, None)
    assert (row["load"], round(row["unplaced"]), row["at"]) == (135.0, 33, "2026-11-26T12:00:00Z")
    assert (round(answer["holds_until"], 1), answer["unknown"], answer["forecast"]) == (1.1, [], None)


def test_documents_and_drafts_change_the_fleet_that_is_asked_about() -> None:
    draft = draft_create(owner="operator", name="", documents=[cells(4)], bases={}, now=NOW)
    for body in ({"documents": [cells(4)]}, {"draft": draft.key}):
        (row,) = asked(lost=[EAST], factor=1.5, **body).json()["deployments"]
        assert (row["breaks"], round(row["holds_until"], 1), round(row["held_until"], 1)) == (False, 2.2, 1.1)
    assert DeploymentRegion.objects.get(region=WEST).cells == 2


def test_the_loss_of_a_region_is_simulated_after_the_documents() -> None:
    forecast = asked(documents=[cells(1)], simulate=WEST).json()["forecast"]
    assert [place["wanted"] for place in forecast["places"] if place["region"] == WEST] == [1]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"lost": ["mars"]}, "there is no region 'mars'; there are: us-east-1, us-west-2"),
        ({"simulate": "mars"}, "there is no region 'mars'"),
        ({"factor": 17}, "factor"),
        ({"factor": "NaN"}, "factor"),
        ({"draft": "unknown"}, "there is no such draft"),
        ({"draft": "a", "documents": [cells(1)]}, "not both"),
        ({"documents": [{"kind": "Model"}]}, "apiVersion"),
        ({"documents": [{**cells(1), "spec": {"regions": [{"region": "mars", "cells": 1}]}}]}, "mars"),
        ({"loose": []}, "unknown field"),
    ],
)
def test_a_wrong_question_says_what_would_be_right(body: dict[str, Any], error: str) -> None:
    answer = asked(**body)
    assert answer.status_code == 400
    assert error in answer.content.decode()


def test_viewers_ask_about_documents_and_only_operators_about_drafts() -> None:
    draft = draft_create(owner="operator", name="", documents=[cells(4)], bases={}, now=NOW)
    for role, status in ((Role.VIEWER, 403), (Role.OPERATOR, 200)):
        caller = calls(make_user(role.value, role))
        assert caller.post("/api/v1/what-if", {"documents": [cells(4)]}, format="json").status_code == 200
        assert caller.post("/api/v1/what-if", {"draft": draft.key}, format="json").status_code == status


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many seconds of a core pass between two looks at the clock. Returns the budget."""

    def set_pace(pace_s: float) -> ForecastBudget:
        clock = count(0, pace_s)
        budget = ForecastBudget(ForecastLimits(patience_s=0), core_s=lambda: float(next(clock)))
        monkeypatch.setattr("controlplane.api.stress.FORECASTS", budget)
        return budget

    return set_pace


@pytest.mark.parametrize(("documents", "field"), [([cells(4)], "documents"), (None, "factor")])
def test_a_question_that_takes_too_long_is_refused(core: Any, documents: Any, field: str) -> None:
    core(6.0)
    body = {"documents": documents} if documents else {}
    answer = asked(**body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (400, field)
    assert "takes longer than a request may (5 s of a core)" in answer.content.decode()
    assert DeploymentRegion.objects.get(region=WEST).cells == 2


def test_a_viewer_uses_up_only_their_own_share_of_a_minute(core: Any) -> None:
    core(1.0)
    viewer, other = calls(make_user("viewer")), calls(make_user("other"))

    def status(caller: Any) -> int:
        return int(caller.post("/api/v1/what-if", {"documents": [cells(4)]}, format="json").status_code)

    answers = [status(viewer) for _ in range(6)]
    assert (answers[0], answers[-1]) == (200, 429)
    assert status(other) == 200
    assert "you had as many forecasts" in viewer.post("/api/v1/what-if", {}, format="json").json()["detail"]


def test_another_forecast_is_waited_for_only_briefly(core: Any) -> None:
    with core(0.0).take("ada"):
        answer = calls(make_user("viewer")).post("/api/v1/what-if", {}, format="json")
    assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
