"""Two-person approval: requested by one, done when another admin approves, and by none alone."""

from datetime import timedelta
from typing import Any

import pytest
from rest_framework.test import APIClient

from accounts.models import Approval, ApprovalRule, ServiceAccount
from accounts.services.approval import WAITS, approval_rule_set, approvals_expire
from fleet.deployments.models import DeploymentRegion
from fleet.rollouts.models import Rollout
from kernel import clock
from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import assert_valid, document
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.region_shares.models import TrafficOverride
from traffic.routing.models import Ingress

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

V1 = "/api/v1"
REAL = {"region": "us-east-1", "mode": "real", "confirm": "us-east-1", "duration_s": 600, "why": "fire"}


@pytest.fixture
def _region() -> None:
    Ingress.objects.create(id="i-1", region=rows.region(), address="a", port=1, created_at=NOW)


@pytest.fixture
def ada() -> APIClient:
    return calls(make_user("ada", Role.ADMIN))


@pytest.fixture
def grace() -> APIClient:
    return calls(make_user("grace", Role.ADMIN))


def require(name: str) -> None:
    approval_rule_set(name=name, required=True, actor="root", now=clock.now())


def post(client: APIClient, path: str, body: dict[str, Any] | None = None) -> Any:
    return client.post(f"{V1}/{path}", body or {}, format="json")


def evacuates(client: APIClient) -> int:
    response = post(client, "traffic/evacuations", REAL)
    assert response.status_code == 202, response.content
    assert not TrafficOverride.objects.exists()
    return int(response.json()["id"])


@pytest.mark.usefixtures("_region")
def test_without_a_rule_one_person_is_enough(ada: APIClient) -> None:
    assert post(ada, "traffic/evacuations", REAL).status_code == 200
    assert TrafficOverride.objects.get().actor == "ada"


@pytest.mark.usefixtures("_region")
def test_an_evacuation_begins_when_another_admin_approves(ada: APIClient, grace: APIClient) -> None:
    require("evacuate-region")
    waits = evacuates(calls(make_user("oscar", Role.OPERATOR)))
    assert post(ada, f"approvals/{waits}/approve").json()["state"] == "done"
    order = TrafficOverride.objects.get()
    assert (order.actor, order.mode, order.region_id, order.why) == ("oscar", "real", "us-east-1", "fire")
    assert "requested by oscar) approved by ada" in Event.objects.get(kind="approval.approved").message
    assert post(grace, f"approvals/{waits}/approve").status_code == 409


@pytest.mark.usefixtures("_region")
def test_nobody_approves_their_own(ada: APIClient) -> None:
    require("evacuate-region")
    waits = evacuates(ada)
    response = post(ada, f"approvals/{waits}/approve")
    assert (response.status_code, "own request" in response.json()["detail"]) == (409, True)
    assert not TrafficOverride.objects.exists()


@pytest.mark.usefixtures("_region")
def test_an_operator_or_a_program_is_no_second_person(ada: APIClient) -> None:
    require("evacuate-region")
    waits = evacuates(ada)
    assert post(calls(make_user("oscar", Role.OPERATOR)), f"approvals/{waits}/approve").status_code == 403
    bot = make_user("bot", Role.ADMIN)
    ServiceAccount.objects.create(user=bot, created_by="ada", created_at=NOW)
    assert post(calls(bot), f"approvals/{waits}/approve").status_code == 403
    assert Approval.objects.get().state == "pending"


@pytest.mark.usefixtures("_region")
def test_a_drill_takes_one(ada: APIClient) -> None:
    require("evacuate-region")
    assert post(ada, "traffic/evacuations", {**REAL, "mode": "drill"}).status_code == 200


@pytest.mark.usefixtures("_region")
def test_what_would_be_refused_is_refused_before_anybody_is_asked(ada: APIClient) -> None:
    require("evacuate-region")
    assert post(ada, "traffic/evacuations", {**REAL, "confirm": "yes"}).status_code == 400
    assert not Approval.objects.exists()


@pytest.mark.usefixtures("_region")
def test_a_request_is_withdrawn_by_its_author_and_rejected_by_admins_only(ada: APIClient) -> None:
    require("evacuate-region")
    oscar = calls(make_user("oscar", Role.OPERATOR))
    mine, other = evacuates(oscar), evacuates(oscar)
    assert post(calls(make_user("olga", Role.OPERATOR)), f"approvals/{mine}/reject").status_code == 403
    assert post(oscar, f"approvals/{mine}/reject").json()["state"] == "withdrawn"
    assert post(ada, f"approvals/{other}/reject", {"why": "no fire"}).json()["outcome"] == "no fire"
    assert post(ada, f"approvals/{other}/approve").status_code == 409


@pytest.mark.usefixtures("_region")
def test_a_request_that_nobody_decides_expires(ada: APIClient, grace: APIClient) -> None:
    require("evacuate-region")
    waits = evacuates(ada)
    Approval.objects.update(expires_at=clock.now() - timedelta(seconds=1))
    assert post(grace, f"approvals/{waits}/approve").status_code == 409
    assert approvals_expire(now=clock.now()) == 1
    assert Approval.objects.get().state == "expired"
    assert timedelta(days=1) == WAITS


@pytest.mark.usefixtures("_region")
def test_what_cannot_be_done_any_more_is_left_failed_with_its_reason(ada: APIClient, grace: APIClient) -> None:
    require("evacuate-region")
    waits = evacuates(ada)
    Ingress.objects.all().delete()
    decided = post(grace, f"approvals/{waits}/approve").json()
    assert (decided["state"], decided["tone"]) == ("failed", "bad")
    assert "region 'us-east-1' has no ingress" in decided["outcome"]


def test_a_rollout_takes_two_where_it_reaches_several_regions(ada: APIClient, grace: APIClient) -> None:
    deployment = rows.deployment(cells=4)
    rows.version("2")
    require("roll-out-everywhere")
    body = {"deployment": deployment.name, "version": "sim-70b@2", "why": "faster"}
    assert post(ada, "rollouts", body).status_code == 200
    Rollout.objects.all().delete()
    DeploymentRegion.objects.create(deployment=deployment, region=rows.region("us-west-2"), cells=4)
    waits = post(ada, "rollouts", body)
    assert (waits.status_code, Rollout.objects.exists()) == (202, False)
    assert post(grace, f"approvals/{waits.json()['id']}/approve").json()["state"] == "done"
    rollout = Rollout.objects.get()
    assert (rollout.actor, rollout.why, rollout.to_version.version) == ("ada", "faster", "2")


def test_a_rule_is_set_by_one_and_lifted_by_two(ada: APIClient, grace: APIClient) -> None:
    path = f"{V1}/approval-rules/evacuate-region"
    assert ada.patch(path, {"required": True}, format="json").json()["required"]
    waits = ada.patch(path, {"required": False}, format="json")
    assert waits.status_code == 202
    assert ApprovalRule.objects.get(action="evacuate-region").required
    assert post(grace, f"approvals/{waits.json()['id']}/approve").json()["state"] == "done"
    assert not ApprovalRule.objects.get(action="evacuate-region").required


@pytest.mark.usefixtures("_region")
def test_the_answer_that_asks_for_a_second_person_is_documented(ada: APIClient) -> None:
    require("evacuate-region")
    body = post(ada, "traffic/evacuations", REAL).json()
    promised = document()["paths"][f"{V1}/traffic/evacuations"]["post"]["responses"]["202"]
    assert_valid(body, promised["content"]["application/json"]["schema"])
