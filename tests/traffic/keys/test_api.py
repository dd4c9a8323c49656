from datetime import timedelta
from typing import Any

import pytest

from kernel import clock
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.keys.selectors import keys_for_ingresses
from traffic.keys.services import key_create
from traffic.routing.models import IngressReport
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish
from traffic.usage.models import UsageHour

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
KEYS = "/api/v1/keys"
ASKED = {"name": "search", "tenant": "rufus", "requests_per_min": 60}


def a_key(tenant: str = "rufus", **columns: Any) -> str:
    return key_create(name="search", tenant=tenant, actor="ann", now=NOW, **columns).key.prefix


def prefixes(**query: str) -> list[str]:
    return [row["prefix"] for row in bearer().get(KEYS, query).json()["results"]]


def test_a_key_is_shown_once() -> None:
    rows.deployment()
    made = bearer().post(KEYS, {**ASKED, "deployments": ["sim-70b"], "serving_class": "batch"}, format="json")
    body = made.json()
    assert made.status_code == 200
    assert body["key"].startswith(f"sw_{body['prefix']}_")
    assert (body["deployments"], body["serving_class"], body["requests_per_min"]) == (["sim-70b"], "batch", 60)
    assert (body["state"], body["tone"], body["tokens_per_min"]) == ("active", "ok", 0)
    again = bearer().get(f"{KEYS}/{body['prefix']}")
    assert "key" not in again.json()
    assert body["key"] not in again.content.decode()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "~others"}, "tenant"),
        ({"name": ""}, "name"),
        ({"deployments": ["nobody"]}, "deployments"),
        ({"serving_class": "soon"}, "serving_class"),
        ({"requests_per_min": -1}, "requests_per_min"),
        ({"tokens_per_min": 2**31}, "tokens_per_min"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"allowed_origins": ["app.example"]}, "allowed_origins"),
        ({"allowed_origins": ["https://app.example/page"]}, "allowed_origins"),
        ({"allowed_origins": ["https://*"]}, "allowed_origins"),
        ({"allowed_origins": [f"https://a{number}" for number in range(21)]}, "allowed_origins"),
        ({"digest": "x"}, "digest"),
    ],
)
def test_what_is_wrong_with_a_new_key_is_named(wrong: dict[str, Any], field: str) -> None:
    answer = bearer().post(KEYS, {**ASKED, **wrong}, format="json")
    assert answer.status_code == 400
    assert [error["field"].split(".")[0] for error in answer.json()["errors"]] == [field]
    assert not ApplicationKey.objects.exists()


def test_limits_name_and_expiry_can_be_changed_and_nothing_else() -> None:
    key = a_key()
    answer = bearer().patch(f"{KEYS}/{key}", {"tokens_per_min": 900, "name": "chat", "expires_at": None}, format="json")
    assert (answer.json()["tokens_per_min"], answer.json()["name"]) == (900, "chat")
    assert bearer().patch(f"{KEYS}/{key}", {"tenant": "other"}, format="json").status_code == 400


def test_origins_are_kept_as_browsers_write_them_and_go_to_ingresses_and_to_the_rotated_key() -> None:
    key = a_key()
    origins = ["HTTPS://App.Example:443/", "http://localhost:3000"]
    answer = bearer().patch(f"{KEYS}/{key}", {"allowed_origins": origins}, format="json")
    assert answer.json()["allowed_origins"] == ["http://localhost:3000", "https://app.example"]
    (entry, _) = keys_for_ingresses()
    assert entry.origins == ("http://localhost:3000", "https://app.example")
    rotated = bearer().post(f"{KEYS}/{key}/rotate", {"grace_s": 60}, format="json").json()
    assert rotated["allowed_origins"] == ["http://localhost:3000", "https://app.example"]


def test_a_revoked_key_says_whom_it_waits_for_and_how_long_it_took() -> None:
    rows.deployment()
    gate = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    key = a_key()
    tables_publish(now=NOW)
    IngressReport.objects.create(ingress=gate, revision=1, connected=True)
    assert (
        "refused with 401 by 1 ingress, within about 5 s" in bearer().get(f"{KEYS}/{key}").json()["effect_of_revoking"]
    )
    body = bearer().post(f"{KEYS}/{key}/revoke", {"why": "leaked"}, format="json").json()
    assert (body["state"], body["waits_for"], body["revocation_lag_s"]) == ("revoked", ["i-us-east-1"], None)
    assert bearer().post(f"{KEYS}/{key}/revoke").status_code == 409
    assert bearer().post(f"{KEYS}/{key}/rotate").status_code == 409
    row = ApplicationKey.objects.get()
    assert row.revoked_at is not None
    ApplicationKey.objects.update(refused_everywhere_at=row.revoked_at + timedelta(seconds=0.5))
    body = bearer().get(f"{KEYS}/{key}").json()
    assert (body["waits_for"], body["revocation_lag_s"]) == ([], 0.5)


def test_a_rotated_key_gives_way_to_the_new_one_after_its_grace() -> None:
    key = a_key()
    body = bearer().post(f"{KEYS}/{key}/rotate", {"grace_s": 60}, format="json").json()
    assert body["key"].startswith(f"sw_{body['prefix']}_")
    assert body["prefix"] != key
    left = ApplicationKey.objects.get(prefix=key).expires_at
    assert left is not None
    assert timedelta(0) < left - clock.now() <= timedelta(seconds=60)


def test_keys_are_found_by_tenant_and_state() -> None:
    lasting, others, ended = a_key(), a_key("other"), a_key(expires_at=NOW + timedelta(seconds=1))
    ApplicationKey.objects.filter(prefix=ended).update(expires_at=NOW - timedelta(days=400))
    revoked = a_key()
    bearer().post(f"{KEYS}/{revoked}/revoke")
    assert prefixes(tenant="other") == [others]
    assert (prefixes(state="active"), prefixes(state="expired")) == ([others, lasting], [ended])
    assert prefixes(state="revoked") == [revoked]


def test_a_list_shows_what_each_key_asked_in_the_last_day() -> None:
    key, hour = a_key(), clock.now().replace(minute=0, second=0, microsecond=0)
    for age, requests in ((1, 5), (3, 7), (48, 100)):
        UsageHour.objects.create(tenant="rufus", key=key, hour=hour - timedelta(hours=age), arrived=requests, limited=1)
    (row,) = bearer().get(KEYS).json()["results"]
    assert (row["requests_24h"], row["limited_24h"], row["errors_24h"]) == (12, 2, 0)


def test_keys_can_be_required_and_each_ingress_says_what_it_enforces() -> None:
    rows.deployment()
    gate = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    body = bearer().post(f"{KEYS}/require", {"required": True, "why": "go-live"}, format="json").json()
    assert (body["required"], body["version"]) == (True, 1)
    assert KeyPolicy.objects.get().required
    tables_publish(now=NOW)
    IngressReport.objects.create(ingress=gate, revision=1, connected=True)
    (ring,) = bearer().get("/api/v1/key-rings").json()["results"]
    assert ring == {
        "ingress": "i-us-east-1", "region": "us-east-1", "connected": True, "version": 1, "wanted_version": 1,
    }  # fmt: skip
    assert bearer().post(f"{KEYS}/require", {}, format="json").status_code == 400
