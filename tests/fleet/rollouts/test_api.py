"""Rollouts over HTTP."""

from typing import Any

import pytest

from fleet.rollouts.models import Rollout
from models_registry.versions.models import VersionState
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows

pytestmark = pytest.mark.django_db

URL = "/api/v1/rollouts"


@pytest.fixture(autouse=True)
def _deployment() -> None:
    rows.version("2", state=VersionState.RELEASED)
    rows.version("draft", state=VersionState.DRAFT)
    rows.deployment(cells=2)
    rows.deployment(cells=1, where="us-west-2")


def post(path: str = "", username: str = "operator", **body: Any) -> Any:
    return bearer(username).post(f"{URL}{path}", body, format="json")


def start(**body: Any) -> Any:
    return post(**{"deployment": "sim-70b", "version": "sim-70b@2", **body})


def test_a_preview_says_what_would_happen_and_changes_nothing() -> None:
    answer = post("/preview", deployment="sim-70b", version="sim-70b@2", policy={"bake_s": 10}).json()
    assert [(stage["name"], stage["cells"], stage["of"]) for stage in answer["stages"]] == [
        ("us-east-1 canary", 1, 2),
        ("us-east-1 100 %", 2, 2),
        ("us-west-2 10 %", 1, 1),
    ]
    assert answer["policy"]["bake_s"] == 10
    assert not Rollout.objects.exists()


def test_a_rollout_is_started_listed_and_read() -> None:
    started = start(username="ada", why="faster").json()
    assert (started["state"], started["stage_label"], started["actor"]) == ("running", "us-east-1 canary", "ada")
    listed = bearer().get(URL, {"state": "running", "deployment": "sim-70b"}).json()["results"]
    assert [row["id"] for row in listed] == [started["id"]]
    assert bearer().get(f"{URL}/{started['id']}").json() == started
    assert bearer().get(URL, {"state": "paused"}).json()["results"] == []


def test_a_validated_version_is_rolled_out_only_by_who_says_so_and_a_draft_never() -> None:
    rows.version("validated", state=VersionState.VALIDATED)
    assert rules(start(version="sim-70b@validated")) == {"version": "released"}
    assert rules(start(version="sim-70b@draft", allow_unreleased=True)) == {"version": "released"}
    assert start(version="sim-70b@validated", allow_unreleased=True).status_code == 200


def test_what_breaks_a_rule_is_named() -> None:
    assert rules(start(policy={"bake": 1})) == {"policy.bake": "policy"}
    assert rules(start(speed=9)) == {"speed": "unknown"}


def test_an_operator_steers_a_rollout() -> None:
    path = f"/{start().json()['id']}"
    assert post(f"{path}/pause", why="lunch").json()["state"] == "paused"
    assert post(f"{path}/pause").status_code == 409
    assert post(f"{path}/resume").json()["state"] == "running"
    assert post(f"{path}/skip-bake", why="x").status_code == 409
    assert rules(post(f"{path}/skip-bake")) == {"why": "required"}
    assert post(f"{path}/roll-back").json()["state"] == "rolling_back"
    assert post(f"{path}/abort").json()["state"] == "failed"
    assert post("/0/abort").status_code == 404


def test_nobody_else_may_read_or_steer() -> None:
    from rest_framework.test import APIClient

    assert APIClient().get(URL).status_code == 401
    assert APIClient().post(URL, {}, format="json").status_code == 401
