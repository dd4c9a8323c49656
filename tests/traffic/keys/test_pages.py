"""Pages of application keys: content and operators' actions."""

import re
from datetime import timedelta
from decimal import Decimal

import pytest
from django.contrib.auth.models import User
from django.test import Client

from fleet.regions.models import Region
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.keys.pages.data import usage_rows
from traffic.keys.services import key_create, key_revoke
from traffic.routing.models import IngressReport
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish
from traffic.usage.models import Budget, UsageHour

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def a_key() -> ApplicationKey:
    return key_create(name="search", tenant="rufus", actor="ada", now=NOW, requests_per_min=1200).key


def act(key: ApplicationKey, action: str, **form: str) -> tuple[int, str]:
    """Posts the action and follows; returns the status and text of the last response."""
    response = signed_in().post(f"/keys/{key.prefix}/ask/{action}/", form, follow=True)
    return response.status_code, response.text


def test_the_newest_hours_are_found_however_old_they_are() -> None:
    now = clock.now().replace(minute=0, second=0, microsecond=0)
    for back in (1, 24 * 20, *range(24 * 3, 24 * 3 + 46)):
        UsageHour.objects.create(tenant="rufus", key="0a0a", hour=now - timedelta(hours=back), arrived=back)
    assert [row["arrived"] for row in usage_rows(now, tenant="rufus")] == [1, *range(72, 118), 480]
    UsageHour.objects.create(tenant="rufus", key="0a0a", hour=now, arrived=0)
    assert [row["arrived"] for row in usage_rows(now, key="0a0a")] == [0, 1, *range(72, 118)]


def test_the_list_shows_keys_with_their_usage() -> None:
    key, hour = a_key(), clock.now().replace(minute=0, second=0, microsecond=0)
    UsageHour.objects.create(tenant="rufus", key=key.prefix, hour=hour, arrived=31, limited=4)
    text = fragment(signed_in(), "/keys/", "keys-table")
    for expected in ("search", f"sw_{key.prefix}…", "rufus", "1,200 requests/min", ">31<", ">4<"):
        assert expected in text
    assert "No key matches" in fragment(signed_in(), "/keys/?state=revoked", "keys-table")


def test_a_spend_limit_is_set_changed_and_removed_by_admins_only() -> None:
    key = a_key()
    viewer = Client()
    viewer.force_login(User.objects.create(username="viewer"))
    assert viewer.post(f"/keys/{key.prefix}/ask/spend/", {"limit": "5"}).status_code == 403
    assert act(key, "spend", limit="5", hard_stop="yes")[0] == 200
    budget = Budget.objects.get()
    assert (budget.key, budget.limit, budget.unit, budget.hard_stop) == (key.prefix, Decimal(5), "usd", True)
    assert "key sw_" in fragment(signed_in(), f"/keys/{key.prefix}/", "key")
    assert 'value="5"' in signed_in().get(f"/keys/{key.prefix}/ask/spend/").text
    status, text = act(key, "spend", limit="-1")
    assert (status, "budget" in text, Budget.objects.get().limit) == (409, True, Decimal(5))
    act(key, "spend", limit="7.5")
    assert (Budget.objects.get().limit, Budget.objects.get().hard_stop) == (Decimal("7.5"), False)
    act(key, "spend", limit="")
    assert not Budget.objects.exists()


def test_a_key_shows_code_with_the_address_of_an_ingress_and_a_model_that_it_may_use() -> None:
    rows.deployment()
    assert "No ingress" in fragment(signed_in(), f"/keys/{a_key().prefix}/", "key-use")
    Region.objects.update(ingress_url="http://10.0.0.1:8080")
    shown = fragment(signed_in(), f"/keys/{ApplicationKey.objects.get().prefix}/", "key-use")
    for expected in ("http://10.0.0.1:8080/v1", "SWITCHYARD_KEY", "JavaScript", "Chat.of(&quot;sim-70b&quot;"):
        assert expected in shown


def test_without_keys_it_says_how_to_make_one() -> None:
    text = fragment(signed_in(), "/keys/", "keys-table")
    assert "every request is served without a limit" in text
    assert 'href="/keys/new/"' in text


def test_a_key_made_by_the_form_is_shown_once() -> None:
    rows.deployment()
    form = {
        "name": "search",
        "tenant": "rufus",
        "deployments": "sim-70b",
        "serving_class": "batch",
        "tokens_per_min": "9",
    }
    text = signed_in().post("/keys/new/", form).text
    key = ApplicationKey.objects.get()
    assert re.search(rf"sw_{key.prefix}_[0-9a-f]{{48}}", text)
    assert (key.deployments, key.serving_class, key.tokens_per_min) == (["sim-70b"], "batch", 9)
    assert key.created_by == "operator"
    assert not re.search(rf"sw_{key.prefix}_[0-9a-f]", signed_in().get(f"/keys/{key.prefix}/").text)


def test_an_invalid_form_says_why_and_keeps_its_values() -> None:
    response = signed_in().post("/keys/new/", {"name": "search", "tenant": "a b", "serving_class": "realtime"})
    assert response.status_code == 409
    assert "Tenant: " in response.text
    assert 'value="search"' in response.text
    assert not ApplicationKey.objects.exists()


def test_limits_are_changed_from_the_page_of_the_key() -> None:
    key = a_key()
    text = act(key, "limit", requests_per_min="60", tokens_per_min="", max_concurrent="3")[1]
    assert "60 requests/min, 3 concurrent" in text
    assert act(key, "limit", requests_per_min="-1")[0] == 409


def test_browser_origins_are_changed_from_the_page_of_the_key() -> None:
    key = a_key()
    act(key, "origins", allowed_origins="https://app.example http://localhost:3000")
    text = signed_in().get(f"/keys/{key.prefix}/ask/origins/").text
    assert 'value="http://localhost:3000 https://app.example"' in text
    assert "http://localhost:3000, https://app.example" in fragment(signed_in(), f"/keys/{key.prefix}/", "key")
    assert act(key, "origins", allowed_origins="app.example")[0] == 409
    act(key, "origins", allowed_origins="")
    assert ApplicationKey.objects.get().allowed_origins == []


def test_a_key_is_revoked_by_its_name_after_its_effect_was_shown() -> None:
    key = a_key()
    assert "Requests with this key are refused with 401" in signed_in().get(f"/keys/{key.prefix}/ask/revoke/").text
    status, text = act(key, "revoke", why="leaked", confirm="serch")
    assert (status, "Type search to confirm; you typed &#x27;serch&#x27;." in text) == (409, True)
    text = act(key, "revoke", why="leaked", confirm="search")[1]
    assert "This key is revoked." in text
    assert ApplicationKey.objects.get().revoked_at is not None
    assert act(key, "revoke", confirm="search")[0] == 409


def test_a_revoked_key_shows_who_still_accepts_it_and_then_how_long_that_was() -> None:
    ingress = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    rows.deployment()
    key = a_key()
    tables_publish(now=NOW)
    IngressReport.objects.create(ingress=ingress, revision=1, connected=True)
    key_revoke(prefix=key.prefix, actor="ada", now=NOW)
    assert "still accepted by i-us-east-1" in fragment(signed_in(), f"/keys/{key.prefix}/", "key")
    ApplicationKey.objects.update(refused_everywhere_at=NOW + timedelta(seconds=0.8))
    assert "Every ingress refused it 0.8 s after" in fragment(signed_in(), f"/keys/{key.prefix}/", "key")
    assert "0.8 s" in fragment(signed_in(), "/keys/", "keys-policy")


def test_a_rotated_key_is_shown_once_on_a_page_of_its_own() -> None:
    key = a_key()
    text = act(key, "rotate")[1]
    new = ApplicationKey.objects.exclude(pk=key.pk).get()
    assert re.search(rf"sw_{new.prefix}_[0-9a-f]{{48}}", text)


def test_requiring_keys_takes_a_typed_confirmation_and_the_reverse_none() -> None:
    a_key()
    assert "1 key would open the fleet" in fragment(signed_in(), "/keys/", "keys-policy")
    assert signed_in().post("/keys/require/", {"required": "yes", "confirm": "yes"}).status_code == 409
    signed_in().post("/keys/require/", {"required": "yes", "confirm": "require keys", "why": "go-live"})
    assert KeyPolicy.objects.get().required
    assert "Requests without a key are refused." in fragment(signed_in(), "/keys/", "keys-policy")
    signed_in().post("/keys/require/", {"required": "no"})
    assert not KeyPolicy.objects.get().required


@pytest.mark.parametrize("path", ["/keys/ffffffff/ask/revoke/", "/keys/{prefix}/ask/explode/"])
def test_an_unknown_key_or_action_is_not_found(path: str) -> None:
    assert signed_in().post(path.format(prefix=a_key().prefix)).status_code == 404


def test_only_signed_in_users_may_act_and_only_by_a_form() -> None:
    key = a_key()
    signed_in()
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(User.objects.get(username="operator"))
    for path in (f"/keys/{key.prefix}/ask/revoke/", "/keys/new/", "/keys/require/"):
        assert Client().post(path).headers["Location"].startswith("/login/")
        assert careful.post(path, {"confirm": "search"}).status_code == 403
    assert ApplicationKey.objects.get().revoked_at is None
