"""To which hosts callbacks of a tenant may go, over HTTP and on the page of keys."""

import pytest
from django.test import Client

from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from traffic.models import CallbackHost

pytestmark = pytest.mark.django_db

HOSTS = "/api/v1/callback-hosts"
BODY = {"tenant": "acme", "host": "App.Example.com:8443"}


def test_an_admin_adds_and_removes_hosts_of_a_tenant() -> None:
    ada = calls(make_user("ada", Role.ADMIN))
    added = ada.post(HOSTS, BODY, format="json").json()
    assert (added["tenant"], added["host"], added["actor"]) == ("acme", "app.example.com:8443", "ada")
    assert ada.post(HOSTS, BODY, format="json").status_code == 409
    assert [row["id"] for row in ada.get(HOSTS, {"tenant": "acme"}).json()["results"]] == [added["id"]]
    assert ada.get(HOSTS, {"tenant": "globex"}).json()["results"] == []
    assert rules(ada.post(HOSTS, {"tenant": "acme", "host": "https://x"}, format="json")) == {"host": "host"}
    assert ada.delete(f"{HOSTS}/{added['id']}").json() == added
    assert list(Event.objects.order_by("id").values_list("kind", flat=True)) == [
        "callback_host.added",
        "callback_host.withdrawn",
    ]


def test_the_page_of_keys_lists_them_and_lets_admins_change_them() -> None:
    admin, viewer = Client(), Client()
    admin.force_login(make_user("ada", Role.ADMIN))
    viewer.force_login(make_user("vera", Role.VIEWER))
    assert admin.post("/keys/callback-hosts/new/", {"tenant": "", "host": "app.example.com"}).status_code == 302
    row = CallbackHost.objects.get()
    for client, may in ((admin, True), (viewer, False)):
        page = client.get("/keys/").content.decode()
        assert "app.example.com" in page
        assert (f"/keys/callback-hosts/{row.pk}/withdraw/" in page) is may
    assert viewer.post(f"/keys/callback-hosts/{row.pk}/withdraw/").status_code == 403
    assert admin.post(f"/keys/callback-hosts/{row.pk}/withdraw/").status_code == 302
    assert not CallbackHost.objects.exists()
