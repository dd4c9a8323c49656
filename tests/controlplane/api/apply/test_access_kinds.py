"""Documents about access: for admins only, without their secrets in plans, and unchanged when applied again."""

from typing import Any

import pytest
from django.contrib.auth.models import User

from accounts.models import GroupRole, IdentityProvider
from accounts.services.identity_provider import unseal_secret
from fleet.webhooks.models import Webhook
from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import bearer

pytestmark = pytest.mark.django_db
URL = "/api/v1/apply"
SECRET = "a secret of the client"


def document(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "switchyard/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


DOCUMENTS = [
    document("User", "eve", email="eve@example.com", groups=["on-call"]),
    document("Group", "on-call", role="operator", claim="sre"),
    document("Webhook", "pager", url="https://hooks.example.com/T0/secret-path", events=["decision.needed"]),
    document("IdentityProvider", "oidc", issuer="https://login.example.com", tenants={"g-rufus": "rufus"}),
]


def apply(*documents: dict[str, Any]) -> Any:
    return bearer().post(URL, {"documents": list(documents)}, format="json")


def test_they_are_applied_in_order_of_dependency_and_then_unchanged() -> None:
    answer = apply(*DOCUMENTS)
    assert answer.status_code == 200, answer.content
    assert [step["kind"] for step in answer.json()["steps"]] == ["Group", "User", "IdentityProvider", "Webhook"]
    assert b"secret-path" not in answer.content
    assert GroupRole.objects.get(group__user__username="eve").role == "operator"
    assert Webhook.objects.get().url.endswith("secret-path")
    assert IdentityProvider.objects.get().tenants == {"g-rufus": "rufus"}
    assert apply(*DOCUMENTS).json()["steps"] == []
    off = apply(document("User", "eve", active=False), document("Webhook", "pager", enabled=False))
    assert off.status_code == 200, off.content
    assert (User.objects.get(username="eve").is_active, Webhook.objects.get().enabled) == (False, False)


def test_a_client_secret_is_stored_encrypted_and_in_no_plan() -> None:
    stated = document("IdentityProvider", "oidc", issuer="https://login.example.com", client_secret=SECRET)
    plan = bearer().post(f"{URL}/preview", {"documents": [stated]}, format="json")
    assert (plan.status_code, SECRET.encode() in plan.content, b"(hidden)" in plan.content) == (200, False, True)
    assert apply(stated).status_code == 200
    row = IdentityProvider.objects.get()
    assert (unseal_secret(row), SECRET in row.sealed_secret) == (SECRET, False)


@pytest.mark.parametrize("one", DOCUMENTS)
def test_only_admins_preview_and_apply_them(one: dict[str, Any]) -> None:
    for client in (calls(make_user("olga", Role.OPERATOR)), calls(make_user("victor"))):
        assert client.post(URL, {"documents": [one]}, format="json").status_code == 403
        assert client.post(f"{URL}/preview", {"documents": [one]}, format="json").status_code == 403
        assert client.post(URL, {"documents": [one], "dry_run": True}, format="json").status_code == 403


@pytest.mark.parametrize(
    ("one", "path"),
    [
        (document("User", "system"), "documents.0.metadata.name"),
        (document("User", "eve", password="correct horse battery"), "documents.0.spec.password"),
        (document("Group", "g"), "documents.0.spec.role"),
        (document("Webhook", "pager", url="http://10.0.0.1/x"), "documents.0.spec.url"),
        (document("IdentityProvider", "other"), "documents.0.metadata.name"),
        (document("IdentityProvider", "oidc", tenants={"g": ""}), "documents.0.spec.tenants.g"),
        (document("IdentityProvider", "oidc", issuer="https://127.0.0.1"), "documents.0.spec.issuer"),
    ],
)
def test_wrong_documents_are_refused_by_path(one: dict[str, Any], path: str) -> None:
    answer = apply(one)
    assert (answer.status_code, path in answer.content.decode()) == (400, True), answer.content
