"""API tokens: what one made by another is worth, who sees them, and what the answer about oneself says."""

from datetime import timedelta
from typing import Any

import pytest
from rest_framework.test import APIClient

from accounts.models import ApiToken, ServiceAccount
from kernel import clock
from kernel.access import Role, Scope
from kernel.secrets import secret_digest
from tests.controlplane.access.callers import calls, granted, make_user
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

V1 = "/api/v1"


def make(client: APIClient, **requested: Any) -> Any:
    return client.post(f"{V1}/tokens", {"name": "laptop", **requested}, format="json")


def shows(text: str) -> APIClient:
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    return client


def test_a_new_one_reads_for_ninety_days_and_is_stored_as_a_hash() -> None:
    made = make(calls(make_user("ada"))).json()
    row = ApiToken.objects.get(prefix=made["prefix"])
    assert (made["scope"], made["state"], made["user"], made["created_by"]) == ("read", "active", "ada", "ada")
    assert row.expires_at is not None
    assert timedelta(days=89) < row.expires_at - clock.now() <= timedelta(days=90)
    assert row.digest == secret_digest(made["token"])
    listed = shows(made["token"]).get(f"{V1}/tokens/{row.prefix}").json()
    assert "token" not in listed
    assert (made["last_used_at"], listed["last_used_at"] is None) == (None, False)


@pytest.mark.parametrize(
    ("shown", "requested", "status"),
    [
        (Scope.READ, "read", 403),
        (Scope.WRITE, "write", 200),
        (Scope.WRITE, "admin", 400),
        (Scope.ADMIN, "admin", 200),
    ],
)
def test_one_made_with_another_has_no_wider_scope(shown: Scope, requested: str, status: int) -> None:
    assert make(calls(make_user("ada", Role.ADMIN), shown), scope=requested).status_code == status


def test_one_made_with_another_does_not_outlive_it() -> None:
    client = calls(make_user("ada"))
    soon = clock.now() + timedelta(hours=1)
    ApiToken.objects.update(expires_at=soon)
    made = make(client, expires_in_days=30).json()
    assert ApiToken.objects.get(prefix=made["prefix"]).expires_at == soon


@pytest.mark.parametrize("days", [0, -1, 367, "soon"])
def test_a_life_out_of_bounds_is_refused(days: object) -> None:
    assert make(calls(make_user("ada")), expires_in_days=days).status_code == 400


def test_everybody_sees_and_ends_their_own_and_admins_all() -> None:
    ada, admin = calls(make_user("ada")), calls(make_user("root", Role.ADMIN))
    prefix = make(calls(make_user("eve"))).json()["prefix"]
    assert ada.get(f"{V1}/tokens/{prefix}").status_code == 404
    assert ada.post(f"{V1}/tokens/{prefix}/revoke").status_code == 404
    assert {token["user"] for token in ada.get(f"{V1}/tokens").json()["results"]} == {"ada"}
    assert admin.post(f"{V1}/tokens/{prefix}/revoke").json()["state"] == "revoked"
    assert admin.post(f"{V1}/tokens/{prefix}/revoke").status_code == 409


def test_only_an_admin_makes_one_for_a_program() -> None:
    bot = make_user("bot", Role.OPERATOR)
    ServiceAccount.objects.create(user=bot, created_by="root", created_at=NOW)
    assert make(calls(make_user("oscar", Role.OPERATOR)), service_account="bot").status_code == 403
    admin = calls(make_user("root", Role.ADMIN))
    assert make(admin, service_account="root").status_code == 400
    made = make(admin, service_account="bot", scope="write").json()
    me = shows(made["token"]).get(f"{V1}/me").json()
    assert (me["username"], me["role"], me["service_account"], me["token"]) == ("bot", "operator", True, made["prefix"])


def test_me_says_what_one_may_do_with_this_token() -> None:
    me = calls(granted("ada", "chat"), Scope.READ).get(f"{V1}/me").json()
    assert (me["role"], me["scope"], me["grants"]) == ("viewer", "read", {"chat": "operator"})


def test_a_role_that_is_taken_counts_at_once() -> None:
    user = make_user("oscar", Role.OPERATOR)
    client = calls(user)
    assert client.get(f"{V1}/me").json()["role"] == "operator"
    user.groups.clear()
    assert client.get(f"{V1}/me").json()["role"] == "viewer"
