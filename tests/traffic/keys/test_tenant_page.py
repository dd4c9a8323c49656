"""The page of a tenant: it opens with a valid key or a login whose group is mapped to the tenant, shows only that
tenant's rows, and ends with the key or the mapping."""

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal

import httpx
import pytest
from django.contrib.auth.models import User
from django.test import Client, override_settings

from accounts.models import Identity
from accounts.models import IdentityProvider as ProviderRow
from kernel import clock
from tests.accounts.identity_provider import CLIENT, SECRET, IdentityProvider, identity_provider
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.services import NewKey, key_create, key_revoke
from traffic.usage.models import UsageHour, UsageMonth
from traffic.usage.planning.counting import month_of

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def ours() -> NewKey:
    rows.deployment()
    theirs = key_create(name="their-key", tenant="ads", actor="ada", now=NOW)
    hour = clock.now().replace(minute=0, second=0, microsecond=0)
    UsageHour.objects.create(tenant="ads", key=theirs.key.prefix, hour=hour, arrived=777)
    key = key_create(name="our-key", tenant="rufus", actor="ada", now=NOW, requests_per_min=60)
    UsageHour.objects.create(tenant="rufus", key=key.key.prefix, hour=hour, arrived=31, limited=4, failed=2)
    UsageMonth.objects.create(tenant="rufus", month=month_of(clock.now()), tokens=12345, charged=Decimal("6.50"))
    return key


def opened(text: str) -> Client:
    client = Client()
    client.post("/tenant/", {"key": text})
    return client


def test_a_key_opens_the_page_of_its_tenant_and_of_no_other(ours: NewKey) -> None:
    shown = opened(ours.text).get("/tenant/").text
    for expected in ("Usage of rufus", "our-key", "$6.50", ">31<", ">4<", ">2<", "60 requests/min"):
        assert expected in shown
    for hidden in ("their-key", "ads", "777", ours.text):
        assert hidden not in shown


@pytest.mark.parametrize("text", ["", "sw_a_b", "sk-other", "x" * 5000, "sw_\0_", "sw_é_b"])
def test_another_text_opens_nothing(ours: NewKey, text: str) -> None:
    client = Client()
    response = client.post("/tenant/", {"key": text})
    assert response.status_code == (400 if "\0" in text else 403)
    assert "Application key" in client.get("/tenant/").text


def test_the_page_ends_with_the_key_and_with_leaving(ours: NewKey) -> None:
    client = opened(ours.text)
    client.post("/tenant/", {"leave": "yes"})
    assert "Usage of rufus" not in client.get("/tenant/").text
    client = opened(ours.text)
    key_revoke(prefix=ours.key.prefix, actor="ada", now=NOW + timedelta(seconds=1))
    response = client.get("/tenant/")
    assert (response.status_code, "Usage of rufus" in response.text) == (403, False)


def test_it_gives_no_access_to_the_console(ours: NewKey) -> None:
    client = opened(ours.text)
    for path in ("/", "/keys/", f"/keys/{ours.key.prefix}/", "/usage/"):
        assert client.get(path).status_code == 302


def test_a_form_of_another_site_is_refused(ours: NewKey) -> None:
    assert Client(enforce_csrf_checks=True).post("/tenant/", {"key": ours.text}).status_code == 403


@pytest.fixture
def sso() -> Iterator[IdentityProvider]:
    """ada is in a group that an admin has mapped to rufus, and in no group of the console."""
    with identity_provider() as known:
        known.claims = {"sub": "u-1", "preferred_username": "ada", "groups": ["g-rufus"]}
        ProviderRow.objects.create(tenants={"g-rufus": "rufus"}, actor="root", changed_at=NOW)
        with override_settings(OIDC_ISSUER=known.url, OIDC_CLIENT_ID=CLIENT, OIDC_CLIENT_SECRET=SECRET):
            yield known


def logged_in(client: Client | None = None) -> Client:
    client = client or Client()
    away = client.get("/login/oidc/", {"next": "/nodes/"})
    back = httpx.get(away.headers["Location"], trust_env=False).headers["Location"]
    client.get(back.removeprefix("http://testserver"))
    return client


def test_a_login_opens_the_page_of_its_tenant_and_nothing_else(ours: NewKey, sso: IdentityProvider) -> None:
    client = logged_in()
    shown = client.get("/tenant/").text
    assert all(expected in shown for expected in ("Usage of rufus", "our-key", "$6.50", "Opened by ada"))
    assert not any(hidden in shown for hidden in ("their-key", "ads", "777", ours.text))
    assert "Usage of ads" not in client.get("/tenant/", {"tenant": "ads"}).text
    assert "Usage of rufus" in client.get("/tenant/", {"tenant": ["x", "\u2028"], "at": "?"}).text
    assert not User.objects.exists()
    for path in ("/", "/keys/", f"/keys/{ours.key.prefix}/", "/usage/", "/settings/", "/audit/", "/plan/"):
        assert client.get(path).status_code == 302, path
    for path in ("/api/v1/keys/", "/api/v1/usage/", "/api/v1/events/"):
        assert client.get(path).status_code in {401, 403}, path


def test_it_ends_with_the_mapping_the_provider_and_eight_hours(
    ours: NewKey, sso: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = logged_in()
    with override_settings(OIDC_ISSUER="https://elsewhere.example"):
        assert "Usage of" not in client.get("/tenant/").text
    ProviderRow.objects.update(tenants={"g-rufus": "ads", "g-other": "rufus"})
    assert "Usage of rufus" not in client.get("/tenant/").text
    ProviderRow.objects.update(tenants={})
    assert client.get("/tenant/").status_code == 403
    ProviderRow.objects.update(tenants={"g-rufus": "rufus"})
    assert "Usage of rufus" in client.get("/tenant/").text
    later = clock.now() + timedelta(hours=8, seconds=1)
    monkeypatch.setattr("kernel.clock.now", lambda: later)
    assert "Usage of rufus" not in client.get("/tenant/").text


def test_several_tenants_are_chosen_among_and_leaving_ends_it(ours: NewKey, sso: IdentityProvider) -> None:
    ProviderRow.objects.update(tenants={"g-rufus": "rufus", "g-ads": "ads", "g-no": "secret-tenant"})
    sso.claims["groups"] = ["g-rufus", "g-ads", "chess"]
    client = logged_in()
    assert "Usage of ads" in client.get("/tenant/").text
    shown = client.get("/tenant/", {"tenant": "rufus"}).text
    assert ("Usage of rufus" in shown, "secret-tenant" in shown) == (True, False)
    assert "Usage of secret-tenant" not in client.get("/tenant/", {"tenant": "secret-tenant"}).text
    client.post("/tenant/", {"leave": "yes"})
    assert "Usage of" not in client.get("/tenant/").text


@override_settings(OIDC_ADMIT_ALL=True)
def test_a_tenants_group_never_opens_the_console_and_ends_its_session(
    ours: NewKey, sso: IdentityProvider, client: Client
) -> None:
    client.force_login(User.objects.create_superuser("root", password=""))
    logged_in(client)
    assert client.get("/nodes/").status_code == 302
    assert "Usage of rufus" in client.get("/tenant/").text
    assert list(User.objects.values_list("username", flat=True)) == ["root"]


def test_a_deactivated_user_gets_no_page_by_a_tenants_group(ours: NewKey, sso: IdentityProvider) -> None:
    user = User.objects.create(username="ada", is_active=False)
    Identity.objects.create(user=user, issuer=sso.url, subject="u-1", created_at=NOW)
    assert "Usage of" not in logged_in().get("/tenant/").text
