"""What an operator lets a tenant's batches reach, over HTTP and on the page of keys."""

import pytest
from django.test import Client

from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.fleet.rows import NOW
from traffic.models import BucketGrant, TenantWebhook
from traffic.services.callback_host import callback_host_allow

pytestmark = pytest.mark.django_db

GRANTS, WEBHOOKS = "/api/v1/bucket-grants", "/api/v1/tenant-webhooks"
PLACE = {"tenant": "acme", "uri": "s3://acme-batches/in/", "may_write": True, "region": "eu-west-1"}
HOOK = {"tenant": "acme", "url": "https://app.example.com/hush"}


def test_an_admin_grants_and_withdraws_places() -> None:
    ada = calls(make_user("ada", Role.ADMIN))
    made = ada.post(GRANTS, PLACE, format="json").json()
    assert (made["uri"], made["region"], made["may_read"], made["may_write"]) == (
        "s3://acme-batches/in", "eu-west-1", True, True,
    )  # fmt: skip
    assert ada.post(GRANTS, PLACE, format="json").status_code == 409
    assert [row["id"] for row in ada.get(GRANTS, {"bucket": "acme-batches"}).json()["results"]] == [made["id"]]
    assert ada.delete(f"{GRANTS}/{made['id']}").json() == made
    kinds = list(Event.objects.order_by("id").values_list("kind", flat=True))
    assert kinds == ["bucket_grant.created", "bucket_grant.withdrawn"]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"uri": "s3://acme.batches"}, {"uri": "uri"}),
        ({"uri": "s3://acme/../x"}, {"uri": "uri"}),
        ({"uri": "s3://ours"}, {"uri": "ours"}),
        ({"uri": "s3://ours/files/batches"}, {"uri": "ours"}),
        ({"may_read": False, "may_write": False}, {"may_read": "grant"}),
        ({"region": "http://169.254.169.254/"}, {"region": "region"}),
    ],
)
def test_what_is_no_place_for_a_tenant_is_refused(settings: object, changes: dict[str, object], wrong: object) -> None:
    settings.FILES = "s3://ours/files"  # type: ignore[attr-defined]
    ada = calls(make_user("ada", Role.ADMIN))
    assert rules(ada.post(GRANTS, PLACE | changes, format="json")) == wrong
    assert ada.post(GRANTS, PLACE | {"uri": "s3://ours/filesystem"}, format="json").status_code == 200


def test_a_secret_is_shown_where_it_is_made_and_nowhere_else() -> None:
    callback_host_allow(tenant="acme", host="app.example.com", actor="ada", now=NOW)
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


def test_the_page_of_keys_lists_both_and_lets_each_role_change_its_own() -> None:
    callback_host_allow(tenant="acme", host="app.example.com", actor="ada", now=NOW)
    admin, operator, viewer = Client(), Client(), Client()
    admin.force_login(make_user("ada", Role.ADMIN))
    operator.force_login(make_user("bob", Role.OPERATOR))
    viewer.force_login(make_user("vera", Role.VIEWER))
    form = {"tenant": "acme", "uri": "s3://acme-batches/in", "region": "", "uses": ["read"]}
    assert operator.post("/keys/buckets/new/", form).status_code == 403
    assert admin.post("/keys/buckets/new/", form).status_code == 302
    grant = BucketGrant.objects.get()
    assert (grant.may_read, grant.may_write, grant.region) == (True, False, "us-east-1")
    made = operator.post("/keys/webhooks/new/", HOOK)
    hook = TenantWebhook.objects.get()
    assert hook.secret in made.content.decode()
    for client, may in ((operator, True), (viewer, False)):
        page = client.get("/keys/").content.decode()
        assert "s3://acme-batches/in" in page
        assert "https://app.example.com/…" in page
        assert hook.secret not in page
        assert (f"/keys/webhooks/{hook.pk}/rotate/" in page) is may
    assert viewer.post(f"/keys/webhooks/{hook.pk}/remove/").status_code == 403
    changed = operator.post(f"/keys/webhooks/{hook.pk}/rotate/")
    hook.refresh_from_db()
    assert hook.secret in changed.content.decode()
    assert operator.post(f"/keys/webhooks/{hook.pk}/remove/").status_code == 302
    assert admin.post(f"/keys/buckets/{grant.pk}/withdraw/").status_code == 302
    assert (BucketGrant.objects.count(), TenantWebhook.objects.count()) == (0, 0)
