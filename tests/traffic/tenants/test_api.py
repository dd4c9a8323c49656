"""Grants of tenants, over HTTP and on the page of keys."""

import pytest
from django.test import Client

from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from traffic.tenants.models import TenantGrant

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

GRANTS = "/api/v1/tenant-grants"
HOST = {"tenant": "acme", "use": "callback", "target": "App.Example.com:8443"}
PLACE = {"tenant": "acme", "use": "read", "target": "s3://acme-batches/in/", "region": "eu-west-1"}


def test_an_admin_grants_and_withdraws_hosts_and_places_of_a_tenant() -> None:
    ada = calls(make_user("ada", Role.ADMIN))
    host, place = (ada.post(GRANTS, body, format="json").json() for body in (HOST, PLACE))
    assert (host["tenant"], host["target"], host["region"], host["actor"]) == (
        "acme",
        "app.example.com:8443",
        "",
        "ada",
    )
    assert (place["target"], place["region"]) == ("s3://acme-batches/in", "eu-west-1")
    assert [ada.post(GRANTS, body, format="json").status_code for body in (HOST, PLACE)] == [409, 409]
    written = ada.post(GRANTS, PLACE | {"use": "write", "region": ""}, format="json").json()
    assert written["region"] == "us-east-1"
    shown = ada.get(GRANTS, {"tenant": "acme", "target": "s3://acme-batches/in"}).json()["results"]
    assert [row["id"] for row in shown] == [place["id"], written["id"]]
    assert ada.get(GRANTS, {"tenant": "globex"}).json()["results"] == []
    assert ada.delete(f"{GRANTS}/{host['id']}").json() == host
    events = list(Event.objects.order_by("id").values_list("kind", "message"))
    assert events[0] == ("tenant_grant.created", "callbacks of acme may go to app.example.com:8443, by ada")
    assert events[-1] == (
        "tenant_grant.withdrawn", "withdrawn: callbacks of acme may go to app.example.com:8443, by ada"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"use": "callback", "region": "", "target": "https://x"}, {"target": "host"}),
        ({"use": "callback", "target": "app.example.com"}, {"region": "region"}),
        ({"use": "callback", "region": "", "target": "s3://acme-batches"}, {"target": "host"}),
        ({"target": "app.example.com"}, {"target": "uri"}),
        ({"target": "s3://acme.batches"}, {"target": "uri"}),
        ({"target": "s3://acme/../x"}, {"target": "uri"}),
        ({"target": "s3://ours"}, {"target": "ours"}),
        ({"target": "s3://ours/files/batches"}, {"target": "ours"}),
        ({"use": "own"}, {"use": "invalid_choice"}),
        ({"region": "http://169.254.169.254/"}, {"region": "region"}),
    ],
)
def test_a_target_that_no_tenant_may_have_is_refused(
    settings: object, changes: dict[str, object], wrong: object
) -> None:
    settings.FILES = "s3://ours/files"  # type: ignore[attr-defined]
    ada = calls(make_user("ada", Role.ADMIN))
    assert rules(ada.post(GRANTS, PLACE | changes, format="json")) == wrong
    assert ada.post(GRANTS, PLACE | {"target": "s3://ours/filesystem"}, format="json").status_code == 200


def test_the_page_of_keys_lists_them_and_lets_admins_change_them() -> None:
    admin, operator, viewer = Client(), Client(), Client()
    admin.force_login(make_user("ada", Role.ADMIN))
    operator.force_login(make_user("bob", Role.OPERATOR))
    viewer.force_login(make_user("vera", Role.VIEWER))
    host = {"tenant": "", "use": "callback", "target": "app.example.com", "region": ""}
    place = {"tenant": "acme", "use": "read", "target": "s3://acme-batches/in", "region": ""}
    assert operator.post("/keys/grants/new/", host).status_code == 403
    assert [admin.post("/keys/grants/new/", form).status_code for form in (host, place)] == [302, 302]
    for row in TenantGrant.objects.all():
        for client, may in ((admin, True), (viewer, False)):
            page = client.get("/keys/").content.decode()
            assert row.target in page
            assert (f"/keys/grants/{row.pk}/withdraw/" in page) is may
        assert viewer.post(f"/keys/grants/{row.pk}/withdraw/").status_code == 403
        assert admin.post(f"/keys/grants/{row.pk}/withdraw/").status_code == 302
    assert not TenantGrant.objects.exists()
