"""Benchmarks over HTTP: permissions, refusals, and the report of a use."""

from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from accounts.models import Grant
from kernel.access import Role
from models_registry.benchmarks.models import Benchmark
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.benchmarks.test_benchmark import measured

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/benchmarks"
ASKED = {
    "version": "sim-70b@1", "deployment": "sim-70b", "region": "us-east-1", "workload": "1000+150",
    "slo": "ttft=500,itl=50",
}  # fmt: skip


@pytest.fixture
def oscar() -> APIClient:
    return calls(make_user("oscar", Role.OPERATOR))


@pytest.fixture
def cell() -> Any:
    return rows.cell("sim-70b-us-east-1-1", rows.node("n-a", fingerprint={"kernel": "6", "sim.engine": "1"}))


def post(client: APIClient, path: str = "", **fields: Any) -> Any:
    return client.post(f"{URL}{path}", {**ASKED, **fields} if not path else {}, format="json")


def test_an_operator_has_what_serves_measured_and_cancels_it(cell: Any, oscar: APIClient) -> None:
    made = post(oscar, workload=" 1000+150 ", seed=3).json()
    assert (made["state"], made["workload"], made["seed"], made["actor"]) == ("queued", "1000+150", 3, "oscar")
    ended = post(oscar, f"/{made['id']}/cancel").json()
    assert (ended["state"], ended["reason"]) == ("cancelled", "cancelled by oscar")
    assert post(oscar, f"/{made['id']}/cancel").status_code == 409


def test_a_viewer_looks_and_a_grant_for_the_deployment_is_enough(cell: Any) -> None:
    viewer = make_user("vera", Role.VIEWER)
    assert post(calls(viewer)).status_code == 403
    assert calls(viewer).get(URL).status_code == 200
    Grant.objects.create(user=viewer, deployment="sim-70b", role="operator", created_by="a", created_at=NOW)
    assert post(calls(viewer)).status_code == 200
    assert Client().get(URL).status_code in {401, 403}


@pytest.mark.parametrize(
    ("wrong", "field", "rule"),
    [
        ({"workload": "many"}, "workload", "readable"),
        ({"slo": "ttft=1"}, "slo", "readable"),
        ({"version": "sim-70b@9"}, "version", "exists"),
        ({"deployment": "nothing"}, "deployment", "serves"),
        ({"region": "mars"}, "deployment", "serves"),
        ({"rules": {"min_s": 0}}, "rules.min_s", "range"),
        ({"rules": {"patience": 1}}, "rules.patience", "choice"),
        ({"more": 1}, "more", "unknown"),
    ],
)
def test_what_is_wrong_is_named(cell: Any, oscar: APIClient, wrong: dict[str, Any], field: str, rule: str) -> None:
    assert rules(post(oscar, **wrong)) == {field: rule}
    assert not Benchmark.objects.exists()


def test_another_version_than_runs_is_not_measured(cell: Any, oscar: APIClient) -> None:
    rows.version("2")
    assert rules(post(oscar, version="sim-70b@2")) == {"version": "serves"}


def test_machines_that_differ_give_no_number(cell: Any, oscar: APIClient) -> None:
    rows.cell("sim-70b-us-east-1-2", rows.node("n-b", fingerprint={"kernel": "7", "sim.engine": "1"}))
    refused = post(oscar)
    assert rules(refused) == {"deployment": "serves"}
    assert "different software" in refused.text


def test_the_best_of_a_use_and_its_histograms(oscar: APIClient) -> None:
    row = measured(rows.version(), 8)
    query = {"workload": row.workload, "slo": "itl=50, ttft=500"}
    best = oscar.get(f"{URL}/best", query).json()["best"]
    assert (best["benchmark"], best["goodput_per_chip"]) == (row.pk, 2.0)
    assert oscar.get(f"{URL}/best", {**query, "aim": "cost"}).json() == {"best": None}
    assert rules(oscar.get(f"{URL}/best", {**query, "aim": "all"})) == {"aim": "choice"}
    assert rules(oscar.get(f"{URL}/best", {"workload": "1+1"})) == {"slo": "readable"}
    assert oscar.get(f"{URL}/{row.pk}/histograms").json() == {"points": [{"rate": 8.0, "histograms": {}}]}
