"""Webhooks of tenants over HTTP and on the page of keys."""

import pytest
from django.test import Client

from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.fleet.rows import NOW
from traffic.tenants.models import GrantUse, TenantWebhook
from traffic.tenants.services import tenant_grant_create

pytestmark = pytest.mark.django_db

WEBHOOKS = "/api/v1/tenant-webhooks"
HOOK = {"tenant": "acme", "url": "https://app.example.com/hush"}


def test_a_secret_is_shown_where_it_is_made_and_nowhere_else() -> None:
    tenant_grant_create(tenant="acme", use=GrantUse.CALLBACK, target="app.example.com", actor="ada", now=NOW)
    bob = calls(make_user("bob", Role.OPERATOR))
    made = bob.post(WEBHOOKS, HOOK | {"events": ["batch.failed"]}, format="json").json()
    assert made["secret"].startswith("whsec_")
    assert (made["url"], made["events"]) == ("https://app.example.com/…", ["batch.failed"])
    shown = bob.get(f"{WEBHOOKS}/{made['id']}").json()
    assert shown == {name: value for name, value in made.items() if name != "secret"}
    again = bob.post(f"{WEBHOOKS}/{made['id']}/rotate", {}, format="json").json()
    assert again["secret"] not in {made["secret"], ""}
    assert again["former_until"]
    assert bob.post(f"{WEBHOOKS}/{made['id']}/rotate", {"at_once": True}, format="json").json()["former_until"] is None
    assert bob.delete(f"{WEBHOOKS}/{made['id']}").status_code == 200
    assert not TenantWebhook.objects.exists()
    assert rules(bob.post(WEBHOOKS, HOOK | {"tenant": "globex"}, format="json")) == {"url": "url"}


def test_the_page_of_keys_lists_them_and_lets_operators_change_them() -> None:
    tenant_grant_create(tenant="acme", use=GrantUse.CALLBACK, target="app.example.com", actor="ada", now=NOW)
    operator, viewer = Client(), Client()
    operator.force_login(make_user("bob", Role.OPERATOR))
    viewer.force_login(make_user("vera", Role.VIEWER))
    made = operator.post("/keys/webhooks/new/", HOOK)
    hook = TenantWebhook.objects.get()
    assert hook.secret in made.content.decode()
    for client, may in ((operator, True), (viewer, False)):
        page = client.get("/keys/").content.decode()
        assert "https://app.example.com/…" in page
        assert hook.secret not in page
        assert (f"/keys/webhooks/{hook.pk}/rotate/" in page) is may
    assert viewer.post(f"/keys/webhooks/{hook.pk}/remove/").status_code == 403
    changed = operator.post(f"/keys/webhooks/{hook.pk}/rotate/")
    hook.refresh_from_db()
    assert hook.secret in changed.content.decode()
    assert operator.post(f"/keys/webhooks/{hook.pk}/remove/").status_code == 302
    assert not TenantWebhook.objects.exists()
