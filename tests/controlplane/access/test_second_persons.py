"""No admin can create their own second approver: by an account, role, password, group, claim or service account."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import call_command
from django.test import Client
from rest_framework.test import APIClient

from accounts.models import Approval, Grant, GroupRole
from accounts.services.account_change import grant_give
from accounts.services.approval import approval_rule_set
from accounts.services.user import service_account_create
from fleet.deployments.models import Deployment, DeploymentRegion
from kernel import clock
from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.region_shares.models import TrafficOverride
from traffic.routing.models import Ingress

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

V1 = "/api/v1"
PASSWORD = "correct horse battery"
SHARES = {"deployment": "sim-70b", "origin": "us-east-1", "duration_s": 600, "why": "fire"}


@pytest.fixture
def ada() -> APIClient:
    return calls(make_user("ada", Role.ADMIN))


@pytest.fixture
def grace() -> APIClient:
    return calls(make_user("grace", Role.ADMIN))


@pytest.fixture
def _rule(ada: APIClient, grace: APIClient) -> None:
    approval_rule_set(name="evacuate-region", required=True, actor="root", now=clock.now())


def post(client: APIClient, path: str, body: dict[str, Any] | None = None) -> Any:
    return client.post(f"{V1}/{path}", body or {}, format="json")


def patch(client: APIClient, path: str, body: dict[str, Any]) -> Any:
    return client.patch(f"{V1}/{path}", body, format="json")


WAYS = {
    "a new admin": lambda ada: post(ada, "users", {"username": "eve", "groups": ["admins"]}),
    "an account with a password": lambda ada: post(ada, "users", {"username": "eve", "password": PASSWORD}),
    "a program that administers": lambda ada: post(ada, "service-accounts", {"name": "bot", "groups": ["admins"]}),
    "a role": lambda ada: patch(ada, "users/oscar", {"groups": ["admins"]}),
    "a password": lambda ada: patch(ada, "users/grace", {"password": PASSWORD}),
    "a deactivated admin": lambda ada: patch(ada, "users/olaf", {"active": True}),
    "a group's role": lambda ada: patch(ada, "groups/operators", {"role": "admin"}),
    "a group's claim": lambda ada: patch(ada, "groups/admins", {"claim": "everybody"}),
    "a new group's claim": lambda ada: post(ada, "groups", {"name": "x", "role": "admin", "claim": "everybody"}),
}


@pytest.fixture
def _people(_rule: None) -> None:
    make_user("oscar", Role.OPERATOR)
    User.objects.filter(pk=make_user("olaf", Role.ADMIN).pk).update(is_active=False)


def state() -> list[Any]:
    return [
        sorted(User.objects.values_list("username", "is_active", "password", "groups")),
        sorted(GroupRole.objects.values_list("group__name", "role", "claim")),
    ]


@pytest.mark.usefixtures("_people")
@pytest.mark.parametrize("way", WAYS)
def test_while_anything_takes_two_so_does_what_makes_a_second_person(
    way: str, ada: APIClient, grace: APIClient
) -> None:
    before = state()
    response = WAYS[way](ada)
    assert response.status_code == 202, response.content
    assert state() == before
    assert PASSWORD not in response.content.decode()
    assert "pbkdf2" not in response.content.decode()
    assert post(ada, f"approvals/{response.json()['id']}/approve").status_code == 409
    assert post(grace, f"approvals/{response.json()['id']}/approve").json()["state"] == "done"
    assert state() != before
    assert Approval.objects.get().secrets == {}


def take_grant(client: Any) -> Any:
    return client.delete(f"{V1}/grants/{Grant.objects.get(user__username='grace').pk}")


LOSSES: dict[str, Callable[[Any], Any]] = {
    "deactivation": lambda ada: patch(ada, "users/grace", {"active": False}),
    "a role": lambda ada: patch(ada, "users/grace", {"groups": ["operators"]}),
    "no role": lambda ada: patch(ada, "users/grace", {"groups": []}),
    "a group's role": lambda ada: patch(ada, "groups/more-admins", {"role": "viewer"}),
    "a group's claim": lambda ada: patch(ada, "groups/more-admins", {"claim": ""}),
    "a group": lambda ada: ada.delete(f"{V1}/groups/more-admins"),
    "a grant": take_grant,
    "a lower grant": lambda ada: post(ada, "grants", {"deployment": "x", "user": "grace", "role": "viewer"}),
}
PAGES: dict[str, tuple[str, dict[str, str]]] = {
    "deactivation": ("users/grace/change", {"what": "active", "active": "no"}),
    "no role": ("users/grace/change", {"what": "groups"}),
    "a group's role": ("groups/more-admins/change", {"role": "viewer", "claim": "sre"}),
    "a group": ("groups/more-admins/delete", {"confirm": "more-admins"}),
    "a grant": ("grants/{}/take", {}),
}


@pytest.fixture
def _second_admin(grace: APIClient) -> None:
    """Grace administers through a group and a grant; Hedy is another admin."""
    team = Group.objects.create(name="more-admins")
    GroupRole.objects.create(group=team, role="admin", claim="sre")
    GroupRole.objects.get_or_create(group=Group.objects.get_or_create(name="operators")[0], role="operator")
    User.objects.get(username="grace").groups.set([team])
    grant_give(deployment="x", role=Role.ADMIN, user="grace", actor="root", now=NOW)
    make_user("hedy", Role.ADMIN)


def standing() -> list[Any]:
    return [*state(), sorted(Grant.objects.values_list("user__username", "role"))]


@pytest.mark.usefixtures("_rule", "_second_admin")
@pytest.mark.parametrize("way", LOSSES)
def test_while_anything_takes_two_so_does_what_takes_power_from_an_admin(way: str, ada: APIClient) -> None:
    before = standing()
    response = LOSSES[way](ada)
    assert response.status_code == 202, response.content
    assert "no longer" in response.json()["summary"] or "ends" in response.json()["summary"]
    assert standing() == before
    assert post(ada, f"approvals/{response.json()['id']}/approve").status_code == 409
    hedy = calls(User.objects.get(username="hedy"))
    assert post(hedy, f"approvals/{response.json()['id']}/approve").json()["state"] == "done"
    assert standing() != before


@pytest.mark.usefixtures("ada", "_rule", "_second_admin")
@pytest.mark.parametrize("way", PAGES)
def test_the_pages_request_it_too(way: str, client: Client) -> None:
    before, (path, form) = standing(), PAGES[way]
    client.force_login(User.objects.get(username="ada"))
    path = path.format(Grant.objects.get().pk)
    assert client.post(f"/settings/{path}/", form).headers["Location"] == "/settings/approvals/"
    assert standing() == before


@pytest.mark.usefixtures("_rule", "_second_admin")
def test_an_admin_steps_down_alone_and_a_program_is_removed_by_one(ada: APIClient) -> None:
    program = service_account_create(name="bot", actor="root", now=NOW, groups=["more-admins"])
    assert patch(ada, f"service-accounts/{program.user.username}", {"active": False}).status_code == 200
    assert patch(ada, "users/ada", {"groups": []}).status_code == 200


@pytest.mark.usefixtures("_second_admin")
@pytest.mark.parametrize("way", LOSSES)
def test_without_a_rule_one_admin_removes_another(way: str, ada: APIClient) -> None:
    assert LOSSES[way](ada).status_code == 200


@pytest.mark.usefixtures("_rule", "_second_admin")
def test_what_a_deactivated_admin_requested_is_withdrawn(ada: APIClient, grace: APIClient) -> None:
    waits = post(grace, "users", {"username": "eve", "groups": ["more-admins"]}).json()["id"]
    other = post(ada, "users", {"username": "eva", "groups": ["more-admins"]}).json()["id"]
    call_command("deactivate_user", "grace")
    row = Approval.objects.get(pk=waits)
    assert (row.state, row.outcome, row.secrets) == ("withdrawn", "grace was deactivated", {})
    assert Approval.objects.get(pk=other).state == "pending"
    assert not User.objects.get(username="grace").is_active


@pytest.mark.usefixtures("_people")
def test_a_password_that_was_approved_is_the_one_that_was_requested(ada: APIClient, grace: APIClient) -> None:
    waits = patch(ada, "users/oscar", {"password": PASSWORD}).json()["id"]
    assert post(grace, f"approvals/{waits}/approve").json()["state"] == "done"
    assert User.objects.get(username="oscar").check_password(PASSWORD)


@pytest.mark.usefixtures("_people")
@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("users/oscar", {"active": False}),
        ("users/oscar", {"groups": ["viewers"]}),
        ("groups/operators", {"claim": "sre"}),
    ],
)
def test_what_makes_nobody_takes_one(path: str, change: dict[str, Any], ada: APIClient) -> None:
    make_user("vera", Role.VIEWER)
    assert patch(ada, path, change).status_code == 200


@pytest.mark.parametrize("way", WAYS)
def test_without_a_rule_one_person_is_enough(way: str, ada: APIClient) -> None:
    make_user("grace", Role.ADMIN)
    make_user("oscar", Role.OPERATOR)
    User.objects.filter(pk=make_user("olaf", Role.ADMIN).pk).update(is_active=False)
    assert WAYS[way](ada).status_code == 200


@pytest.fixture
def _region() -> None:
    Ingress.objects.create(id="i-1", region=rows.region(), address="a", port=1, created_at=NOW)
    Ingress.objects.create(id="i-2", region=rows.region("us-west-2"), address="a", port=2, created_at=NOW)


def evacuates(client: APIClient) -> int:
    body = {"region": "us-east-1", "mode": "real", "confirm": "us-east-1", "duration_s": 600, "why": "fire"}
    response = post(client, "traffic/evacuations", body)
    assert response.status_code == 202, response.content
    return int(response.json()["id"])


@pytest.mark.usefixtures("_region", "_rule")
def test_who_becomes_an_admin_after_the_request_does_not_approve_it(ada: APIClient, grace: APIClient) -> None:
    oscar = make_user("oscar", Role.OPERATOR)
    waits = evacuates(ada)
    make_user("eve", Role.ADMIN)
    oscar.groups.add(GroupRole.objects.get(role="admin").group)
    for late in ("eve", "oscar"):
        response = post(calls(User.objects.get(username=late)), f"approvals/{waits}/approve")
        assert (response.status_code, "not an admin when" in response.json()["detail"]) == (409, True)
    assert not TrafficOverride.objects.exists()
    assert post(grace, f"approvals/{waits}/approve").status_code == 200


@pytest.mark.usefixtures("_region", "_rule")
@pytest.mark.parametrize("made_by", ["ada", "somebody"])
def test_who_made_a_program_or_its_token_does_not_approve_what_it_requests(
    made_by: str, ada: APIClient, grace: APIClient
) -> None:
    maker = ada if made_by == "ada" else grace
    make_user("root", Role.OPERATOR)
    assert post(maker, "service-accounts", {"name": "bot", "groups": ["operators"]}).status_code == 200
    token = post(ada, "tokens", {"name": "t", "scope": "write", "service_account": "bot"}).json()["token"]
    bot = APIClient()
    bot.credentials(HTTP_AUTHORIZATION=f"Bearer {token}")
    waits = evacuates(bot)
    assert post(ada, f"approvals/{waits}/approve").status_code == 409
    assert post(grace, f"approvals/{waits}/approve").status_code == (200 if made_by == "ada" else 409)


@pytest.mark.usefixtures("_region", "_rule")
def test_fixed_shares_that_empty_a_region_take_two_as_its_evacuation_does(ada: APIClient, grace: APIClient) -> None:
    deployment = rows.deployment(cells=2)
    assert isinstance(deployment, Deployment)
    emptied = {**SHARES, "shares": {"us-west-2": 0.95, "us-east-1": 0.05}}
    waits = post(ada, "traffic/overrides", emptied)
    assert (waits.status_code, TrafficOverride.objects.count()) == (202, 0)
    assert post(grace, f"approvals/{waits.json()['id']}/approve").json()["state"] == "done"
    assert TrafficOverride.objects.get().actor == "ada"
    assert post(ada, "traffic/overrides", {**SHARES, "shares": {"us-west-2": 0.5, "us-east-1": 0.5}}).status_code == 200
    DeploymentRegion.objects.all().delete()
    assert post(ada, "traffic/overrides", emptied).status_code == 200


EMPTY = {"us-east-1": 0, "us-west-2": 2}


@pytest.mark.usefixtures("_rule")
@pytest.mark.parametrize("way", ["the API", "a document", "the page"])
def test_scaling_a_region_down_to_nothing_takes_two_as_its_evacuation_does(
    way: str, ada: APIClient, grace: APIClient, client: Client
) -> None:
    rows.deployment(cells=2)
    rows.deployment(cells=2, where="us-west-2")
    if way == "the API":
        waits = patch(ada, "deployments/sim-70b", {"regions": [{"region": "us-east-1", "cells": 0}]})
        assert (waits.status_code, waits.json()["summary"]) == (202, "scale sim-70b to 0 cells in us-east-1")
    elif way == "a document":
        regions = [{"region": region, "cells": count} for region, count in EMPTY.items()]
        kind = {"apiVersion": "switchyard/v1", "kind": "Deployment", "metadata": {"name": "sim-70b"}}
        assert "scale sim-70b" in post(ada, "apply", {"documents": [{**kind, "spec": {"regions": regions}}]}).text
    else:
        client.force_login(User.objects.get(username="ada"))
        form = {"confirm": "sim-70b", **{f"cells-{region}": count for region, count in EMPTY.items()}}
        assert client.post("/deployments/sim-70b/scale/", form).headers["Location"] == "/settings/approvals/"
    assert cells() == {"us-east-1": 2, "us-west-2": 2}
    assert post(ada, f"approvals/{Approval.objects.get().pk}/approve").status_code == 409
    assert post(grace, f"approvals/{Approval.objects.get().pk}/approve").json()["state"] == "done"
    assert cells() == EMPTY


@pytest.mark.usefixtures("_rule")
def test_scaling_that_leaves_cells_takes_one(ada: APIClient) -> None:
    rows.deployment(cells=2)
    assert patch(ada, "deployments/sim-70b", {"regions": [{"region": "us-east-1", "cells": 1}]}).status_code == 200
    assert cells() == {"us-east-1": 1}


def cells() -> dict[str, int]:
    return dict(DeploymentRegion.objects.values_list("region_id", "cells"))
