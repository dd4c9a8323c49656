"""The page of a tenant: it opens with a valid key, shows only that tenant's rows, and ends with the key."""

from datetime import timedelta
from decimal import Decimal

import pytest
from django.test import Client

from kernel import clock
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
