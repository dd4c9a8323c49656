"""Raw records: for admins, read-only, without secrets, within the content security policy of all pages."""

import re

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from accounts.models import GroupRole
from controlplane.admin import record_site
from controlplane.static_files import hashed_name
from fleet.nodes.models import Node
from fleet.webhooks.models import Webhook
from kernel.secrets import secret_issue
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.services import key_create

pytestmark = pytest.mark.django_db

TABLES = [model._meta.label_lower.replace(".", "/") for model in record_site()._registry]


@pytest.mark.slow
def test_every_table_is_listed_and_nothing_can_be_added(thorough: bool) -> None:
    """By default one table in three: one class declares the pages of all."""
    client, tables = signed_in(), TABLES if thorough else TABLES[::3]
    listed = {table: client.get(f"/admin/{table}/").status_code for table in tables}
    assert {table: status for table, status in listed.items() if status != 200} == {}
    added = {table: client.get(f"/admin/{table}/add/").status_code for table in tables}
    assert {table: status for table, status in added.items() if status != 404} == {}


def test_one_record_is_shown_and_not_changed() -> None:
    node = rows.node("n-00000001")
    client, path = signed_in(), reverse("admin:fleet_node_change", args=[node.pk])
    page = client.get(path).content.decode()
    assert "n-00000001" in page
    assert 'type="submit"' not in page
    assert client.post(path, {"state": "retired"}).status_code == 403
    assert client.post(f"/admin/fleet/node/{node.pk}/delete/", {"post": "yes"}).status_code == 404
    assert Node.objects.get().state == "ready"


def test_secrets_are_not_shown() -> None:
    new = key_create(name="k", tenant="t", actor="a", now=NOW)
    hook = Webhook.objects.create(name="pager", url="https://x", secret=secret_issue().text, created_at=NOW)
    client = signed_in()
    key_page = client.get(reverse("admin:traffic_applicationkey_change", args=[new.key.pk])).content.decode()
    assert new.key.prefix in key_page
    assert new.key.digest not in key_page
    assert hook.secret not in client.get(reverse("admin:fleet_webhook_change", args=[hook.pk])).content.decode()
    user = User.objects.get()
    user.set_password("correct horse battery staple")
    user.save()
    client.force_login(user)
    assert user.password not in client.get(reverse("admin:auth_user_change", args=[user.pk])).content.decode()


def test_users_who_are_no_admins_are_refused() -> None:
    client = Client()
    client.force_login(User.objects.create(username="ada", is_staff=True))
    assert client.get("/admin/", follow=True).status_code == 403
    assert client.get("/admin/fleet/node/", follow=True).status_code == 403
    assert GroupRole.objects.count() == 0


def test_anonymous_users_go_to_the_login() -> None:
    response = Client().get("/admin/fleet/node/", follow=True)
    assert response.redirect_chain[-1][0].startswith(reverse("login"))


@pytest.mark.parametrize("path", ["", "fleet/", "fleet/node/", "fleet/node/n-00000001/change/"])
def test_a_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere(path: str) -> None:
    rows.node("n-00000001")
    response = signed_in().get(f"/admin/{path}")
    page = response.content.decode()
    assert response.status_code == 200
    assert "'unsafe-inline'" not in response["Content-Security-Policy"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", page)
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert all(address.startswith(("/", "?", ".")) and not address.startswith("//") for address in loaded)
    assert hashed_name("admin_site/admin_site.css") in page


def test_what_the_pages_load_is_there() -> None:
    client = signed_in()
    page = client.get("/admin/fleet/node/").content.decode()
    for address in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
        response = client.get(address)
        assert response.status_code == 200, address
        assert response.getvalue(), address
