"""Load over time over HTTP."""

from datetime import timedelta

import pytest

from fleet.load.models import LoadSubject, LoadWindow
from fleet.load.planner import FINE_S
from fleet.load.selectors import cell_subject
from fleet.load.services import node_windows_sample
from kernel import clock
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("path", ["cells/c-1", "deployments/sim-70b", "regions/us-east-1"])
def test_where_nobody_looked_there_is_nothing(path: str) -> None:
    rows.cell("c-1")
    found = bearer().get(f"/api/v1/{path}/load").json()
    assert (found["range"], found["step_s"]) == ("1h", FINE_S)
    assert found["points"] == []


def test_a_window_says_what_happened_in_it() -> None:
    rows.cell("c-1")
    now = clock.now()
    subject = LoadSubject.objects.create(name=cell_subject("c-1"), seen_at=now)
    at = now.replace(second=now.second // FINE_S * FINE_S, microsecond=0) - timedelta(seconds=FINE_S)
    gauges = {"slow": 0, "cells": 1, "in_flight": 2, "queued": 0, "tokens_per_s": 50}
    figures = {"covered_s": FINE_S, "requests": 30, "errors": 3, **gauges}
    LoadWindow.objects.create(subject=subject, step_s=FINE_S, at=at, **figures)
    points = bearer().get("/api/v1/cells/c-1/load", {"range": "1h"}).json()["points"]
    assert [(point["requests_per_s"], point["errors_percent"]) for point in points] == [(2.0, 10.0)]
    assert points[0]["at"] == at.isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize(
    ("query", "broken"),
    [
        ("range=9y", {"range": "invalid_choice"}),
        ("from=yesterday", {"from": "invalid"}),
        ("from=2026-11-21T12:00Z&to=2026-11-21T12:00Z", {"from": "range"}),
        ("x=1", {"x": "unknown"}),
    ],
)
def test_what_it_cannot_show_is_refused(query: str, broken: dict[str, str]) -> None:
    rows.cell("c-1")
    assert rules(bearer().get(f"/api/v1/cells/c-1/load?{query}")) == broken


def test_a_cell_that_is_not_there_has_no_load() -> None:
    assert bearer().get("/api/v1/cells/none/load").status_code == 404


def test_use_of_a_node_is_shown_by_the_minute() -> None:
    rows.node("n-1", report={"last_seen_at": clock.now(), "telemetry": {"host_cpu_percent": 12.5}})
    node_windows_sample(now=clock.now())
    shown = bearer().get("/api/v1/nodes/n-1/use").json()
    assert (shown["range"], shown["step_s"]) == ("1h", 60)
    assert [(point["cpu_percent"], point["power_watts"]) for point in shown["points"]] == [(12.5, None)]
