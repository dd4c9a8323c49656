"""Searches over HTTP: permissions, errors and output."""

from typing import Any

import pytest
from rest_framework.test import APIClient

from accounts.models import Grant
from kernel.access import Role
from models_registry.benchmarks.models import ConfigurationSearch
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

URL = "/api/v1/configuration-searches"
ASKED = {
    "version": "sim-70b@1", "deployment": "sim-70b", "workload": "1000+150", "slo": "ttft=500,itl=50",
    "varied": {"engine_options.max_num_seqs": [8, 16]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def cell() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-a", fingerprint={"kernel": "6", "sim.engine": "1"}))


def post(client: APIClient, path: str = "", **fields: Any) -> Any:
    return client.post(f"{URL}{path}", {**ASKED, **fields} if not path else {}, format="json")


def test_an_operator_has_configurations_searched_and_cancels_it() -> None:
    oscar = calls(make_user("oscar", Role.OPERATOR))
    made = post(oscar).json()
    assert (made["state"], made["region"], made["best"]) == ("running", "us-east-1", None)
    assert [(one["number"], one["choice"], one["standing"]) for one in made["configurations"]] == [
        (1, {"engine_options.max_num_seqs": 8}, "waiting"),
        (2, {"engine_options.max_num_seqs": 16}, "waiting"),
    ]
    assert post(oscar).status_code == 409
    assert post(oscar, f"/{made['id']}/cancel").status_code == 200
    assert post(oscar, f"/{made['id']}/cancel").status_code == 409


def test_it_takes_who_may_write_versions_not_one_who_may_operate_a_deployment() -> None:
    viewer = make_user("vera", Role.VIEWER)
    Grant.objects.create(user=viewer, deployment="sim-70b", role="operator", created_by="a", created_at=NOW)
    assert post(calls(viewer)).status_code == 403
    assert calls(viewer).get(URL).status_code == 200


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"version": "sim-70b@9"}, "version"),
        ({"deployment": "none"}, "deployment"),
        ({"workload": "much"}, "workload"),
        ({"slo": "ttft=1"}, "slo"),
        ({"varied": {"golden_prompts": [[]]}}, "varied"),
        ({"varied": [1]}, "varied"),
        ({"rules": {"min_s": 0}}, "rules.min_s"),
        ({"most_trials": 100_000}, "most_trials"),
        ({"more": 1}, "more"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    answer = post(calls(make_user("oscar", Role.OPERATOR)), **wrong)
    assert (answer.status_code, field in rules(answer)) == (400, True), answer.json()
    assert not ConfigurationSearch.objects.exists()
