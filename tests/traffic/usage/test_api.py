"""A tenant's own usage, read with one of its keys, and no other."""

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from kernel import clock
from traffic.keys.services import NewKey, key_create, key_revoke
from traffic.usage.models import UsageHour

pytestmark = pytest.mark.django_db


def a_key(tenant: str) -> NewKey:
    return key_create(name="search", tenant=tenant, actor="ann", now=clock.now())


def used_by_tenant(tenant: str, key: str = "", hours_ago: int = 0, **counts: Any) -> None:
    hour = clock.now().replace(minute=0, second=0, microsecond=0) - timedelta(hours=hours_ago)
    UsageHour.objects.create(tenant=tenant, key=key, hour=hour, **counts)


def get_usage(text: str = "", **query: str) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {text}"} if text else {}
    response = Client().get("/v1/usage", query, headers=headers)
    return response.status_code, response.json()


def test_a_tenant_sees_its_own_usage_whatever_else_it_asks_for() -> None:
    ours, theirs = a_key("rufus"), a_key("other")
    used_by_tenant("rufus", requests=3, completion_tokens=9)
    used_by_tenant("rufus", ours.key.prefix, requests=4, limited=1)
    used_by_tenant("other", requests=100)
    used_by_tenant("other", theirs.key.prefix, requests=100)
    status, body = get_usage(ours.text, tenant="other", key=theirs.key.prefix)
    assert (status, body["tenant"]) == (200, "rufus")
    assert [(row["key"], row["requests"]) for row in body["data"]] == [(None, 3), (ours.key.prefix, 4)]
    assert (body["data"][0]["completion_tokens"], body["data"][1]["limited"]) == (9, 1)


def test_only_as_many_hours_as_are_asked_for() -> None:
    key = a_key("rufus")
    for hours_ago in (0, 5, 30):
        used_by_tenant("rufus", hours_ago=hours_ago, requests=hours_ago)
    assert [row["requests"] for row in get_usage(key.text)[1]["data"]] == [0, 5]
    assert len(get_usage(key.text, hours="48")[1]["data"]) == 3
    for wrong in ("0", "x", "2161", "-1", "999999999999"):
        status, body = get_usage(key.text, hours=wrong)
        assert (status, body["error"]["param"]) == (400, "hours")


def test_an_invalid_or_missing_key_shows_no_usage() -> None:
    key = a_key("rufus")
    used_by_tenant("rufus", requests=3)
    key_revoke(prefix=key.key.prefix, actor="ann", now=clock.now())
    for text, code in (("", "missing_api_key"), ("none", "missing_api_key"), (key.text, "invalid_api_key")):
        status, body = get_usage(text)
        assert (status, body["error"]["code"]) == (401, code)


def test_usage_is_grouped_as_requested() -> None:
    key = a_key("rufus")
    used_by_tenant("rufus", key.key.prefix, deployment="chat", adapter="tuned", serving_class="batch", requests=3)
    used_by_tenant("rufus", key.key.prefix, deployment="chat", serving_class="batch", requests=4)
    rows = get_usage(key.text, group="deployment,adapter")[1]["data"]
    assert [(row["deployment"], row["adapter"], row["requests"]) for row in rows] == [
        ("chat", None, 4),
        ("chat", "tuned", 3),
    ]
    (row,) = get_usage(key.text, group="class")[1]["data"]
    assert (row["class"], row["requests"], "key" in row) == ("batch", 7, False)


@pytest.mark.parametrize("group", ["tenant", "nonsense", "", "key,", "serving_class"])
def test_an_unknown_group_is_refused_with_those_there_are(group: str) -> None:
    status, body = get_usage(a_key("rufus").text, group=group)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_value", "group")
    assert "key, deployment, class, adapter" in body["error"]["message"]
