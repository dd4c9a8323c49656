"""What-ifs of drafts: losses and load on the fleet that a draft leaves, computed on request and stored."""

from typing import Any
from urllib.parse import quote

import pytest
import redis

from controlplane import stored_what_ifs
from controlplane.forecast_budget import ForecastBudget, ForecastLimits
from controlplane.stress import Question, WhatIf, what_if
from fleet.deployments.models import DeploymentRegion
from fleet.drafts import services
from kernel import clock
from kernel.circuit_breaker import CircuitBreaker
from models_registry.versions.models import ModelVersion
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.drafts.test_pages import CELLS, described, draft, url
from tests.traffic.rows import EAST, forecast_row

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
WEST = "us-west-2"


@pytest.fixture
def forecast() -> None:
    """Two cells for 64 requests each in each of two regions, and 90 requests in the east."""
    for where in (EAST, WEST):
        rows.deployment(cells=2, where=where)
    ModelVersion.objects.update(max_concurrency=64)
    forecast_row(75, made_at=clock.now())


def west(cells: int) -> dict[str, Any]:
    return {**CELLS, "spec": {"regions": [{"region": WEST, "cells": cells}]}}


@pytest.mark.usefixtures("forecast")
def test_regions_are_lost_and_load_rises_on_the_fleet_that_the_draft_leaves() -> None:
    client = signed_in()
    less, more = draft(west(1)), draft(west(4))
    text = fragment(client, url(less, f"?lost={EAST}"), "draft-what-if")
    assert "The fleet without us-east-1 holds until 0.5x the forecast of the next day (now 1.1x)" in text
    assert "first to break: TTFT of sim-70b in us-east-1" in text
    assert "breaks" in text
    text = fragment(client, url(more, f"?lost={EAST}&factor=1.2"), "draft-what-if")
    assert "holds until 2.2x the forecast of the next day (now 1.1x)" in text
    assert "breaks" not in text
    assert DeploymentRegion.objects.get(region=WEST).cells == 2


@pytest.mark.usefixtures("forecast")
def test_the_loss_of_a_region_after_the_draft_is_simulated() -> None:
    text = fragment(signed_in(), url(draft(west(1)), f"?simulate={WEST}"), "draft-what-if")
    assert f"If {WEST} is lost after this draft" in text
    assert f"sim-70b in {WEST}" in text


@pytest.mark.usefixtures("forecast")
@pytest.mark.parametrize("query", ["factor=nan&lost=mars", "simulate=mars", "lost=&factor=1e999&simulate=%0a"])
def test_odd_questions_are_answered(query: str) -> None:
    text = fragment(signed_in(), url(draft(west(1)), f"?{query}"), "draft-what-if")
    assert 'value="1.0"' in text
    assert ("There is no region" in text) == ("simulate=mars" in query)


@pytest.mark.usefixtures("forecast")
def test_a_what_if_is_computed_on_request_and_stored_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Question] = []

    def counted(question: Question, **given: Any) -> WhatIf:
        computed.append(question)
        return what_if(question, **given)

    monkeypatch.setattr("fleet.drafts.pages.review.what_if", counted)
    client, row = signed_in(), draft(west(1))

    def shown(query: str = "") -> str:
        return fragment(client, url(row, query), "draft-what-if")

    assert "Not computed yet" in shown()
    assert not computed, "a visit computes nothing"
    answer = shown(f"?factor=1.0&lost={EAST}")
    assert "holds until 0.5x" in answer
    assert "for operator" in answer
    again = answer.partition('name="again" value="')[2].partition('"')[0]
    for query in ("", f"?lost={EAST}&factor=1", f"?lost={EAST}&again=2020-01-01", "?again=x&page=-1"):
        text = shown(query)
        assert ("holds until 0.5x" in text, "changed since" in text) == (True, False)
    assert len(computed) == 1
    DeploymentRegion.objects.filter(region=EAST).update(cells=3)
    services.draft_add(owner="operator", documents=[described("more")], bases={}, now=clock.now())
    assert "the draft and the fleet changed since" in shown()
    assert len(computed) == 1
    assert "changed since" not in shown(f"?lost={EAST}&factor=1&again={quote(again)}")
    assert "changed since" not in shown(f"?lost={EAST}&factor=1&again={quote(again)}")
    assert len(computed) == 2, "a reload computes nothing"


@pytest.mark.usefixtures("forecast")
def test_a_refused_what_if_keeps_the_last_answer_and_says_to_what(monkeypatch: pytest.MonkeyPatch) -> None:
    client, row = signed_in(), draft(west(1))
    fragment(client, url(row, f"?lost={EAST}"), "draft-what-if")
    busy = ForecastBudget(ForecastLimits(patience_s=0))
    monkeypatch.setattr(stored_what_ifs, "FORECASTS", busy)
    with busy.take("ada"):
        text = fragment(client, url(row, "?factor=2"), "draft-what-if")
    assert "Another forecast is being made" in text
    assert "The answer below is for 1.0 times the load without us-east-1" in text
    assert 'value="2.0"' in text


@pytest.mark.usefixtures("forecast")
def test_without_valkey_an_answer_is_shown_and_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = redis.Redis(host="127.0.0.1", port=1)
    monkeypatch.setattr(stored_what_ifs, "_server", lambda: gone)
    monkeypatch.setattr(stored_what_ifs, "BREAKER", CircuitBreaker(pause_s=0))
    client, row = signed_in(), draft(west(1))
    assert "holds until" in fragment(client, url(row, f"?lost={EAST}"), "draft-what-if")
    assert "Not computed yet" in fragment(client, url(row), "draft-what-if")


def test_a_draft_that_cannot_be_applied_refers_to_the_present_fleet() -> None:
    rows.deployment()
    lost = {**CELLS, "spec": {"regions": [{"region": "nowhere", "cells": 1}]}}
    assert "cannot be applied" in fragment(signed_in(), url(draft(lost)), "draft-what-if")
    assert "this is the present fleet" in fragment(signed_in(), url(draft(), "?factor=1"), "draft-what-if")
