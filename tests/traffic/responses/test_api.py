"""Stored responses over HTTP in OpenAI's format: answers and ownership."""

import json
from typing import Any

import pytest
from django.test import Client

from tests.fleet.rows import NOW
from tests.traffic.rows import in_background, kept, serving_fleet
from traffic.keys.services import key_create, key_revoke, keys_require
from traffic.responses.models import StoredResponse
from traffic.tenants.selectors import Application

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture(autouse=True)
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.clock.now", lambda: NOW)
    serving_fleet()


def key_of(tenant: str) -> tuple[Application, dict[str, str]]:
    new = key_create(name=tenant, tenant=tenant, actor="root", now=NOW)
    return Application(tenant, new.key.prefix), {"Authorization": f"Bearer {new.text}"}


def get(path: str, headers: dict[str, str]) -> Any:
    return Client().get(f"/v1/responses/{path}", headers=headers)


def error_of(answer: Any) -> tuple[int, str | None, str]:
    error = json.loads(answer.content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["message"]


def test_a_response_is_retrieved_and_deleted_by_its_tenant_alone() -> None:
    (acme, own), (_, other) = key_of("acme"), key_of("globex")
    response_id = kept(acme)
    gone = (404, None, f"Response with id '{response_id}' not found.")
    for headers in (other, {}):
        for path in (response_id, f"{response_id}/input_items"):
            assert error_of(get(path, headers)) == gone
        assert error_of(Client().delete(f"/v1/responses/{response_id}", headers=headers)) == gone
        assert error_of(Client().post(f"/v1/responses/{response_id}/cancel", headers=headers)) == gone
    shown = json.loads(get(response_id, own).content)
    assert (shown["id"], shown["object"], shown["status"], shown["store"]) == (
        response_id,
        "response",
        "completed",
        True,
    )
    deleted = Client().delete(f"/v1/responses/{response_id}", headers=own)
    assert json.loads(deleted.content) == {"id": response_id, "object": "response", "deleted": True}
    assert error_of(get(response_id, own)) == gone


def test_one_in_the_background_is_cancelled() -> None:
    acme, own = key_of("acme")
    path = f"/v1/responses/{in_background(acme)}/cancel"
    assert json.loads(Client().post(path, headers=own).content)["status"] == "cancelled"
    assert error_of(Client().post(f"/v1/responses/{kept(acme)}/cancel", headers=own))[0] == 400


def test_what_went_in_is_listed_by_pages() -> None:
    acme, own = key_of("acme")
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    path = f"{kept(acme, input=items)}/input_items"
    texts, after = [], ""
    for _ in range(3):
        page = json.loads(get(f"{path}?order=asc&limit=2{after}", own).content)
        texts += [item["content"][0]["text"] for item in page["data"]]
        after = f"&after={page['last_id']}"
        assert page["first_id"] == page["data"][0]["id"]
        assert page["has_more"] is (len(texts) < 5)
    assert texts == ["0", "1", "2", "3", "4"]
    newest_first = json.loads(get(path, own).content)
    assert [item["content"][0]["text"] for item in newest_first["data"]] == ["4", "3", "2", "1", "0"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "limit=²", "order=up", "after=msg_none"])
def test_a_page_that_cannot_be_is_refused_by_name(query: str) -> None:
    acme, own = key_of("acme")
    answer = get(f"{kept(acme)}/input_items?{query}", own)
    assert answer.status_code == 400
    assert json.loads(answer.content)["error"]["param"] == query.partition("=")[0]


def test_a_kept_response_is_not_streamed() -> None:
    acme, own = key_of("acme")
    assert error_of(get(f"{kept(acme)}?stream=true&starting_after=3", own))[:2] == (400, "unsupported_value")
    assert get(f"{kept(acme)}?stream=false", own).status_code == 200


def test_a_key_that_opens_nothing_finds_nothing() -> None:
    acme, own = key_of("acme")
    response_id = kept(acme)
    keys_require(required=True, actor="root", now=NOW)
    assert error_of(get(response_id, {}))[:2] == (401, "missing_api_key")
    key_revoke(prefix=acme.key, actor="root", now=NOW)
    assert error_of(get(response_id, own))[:2] == (401, "invalid_api_key")
    assert error_of(Client().delete(f"/v1/responses/{response_id}", headers=own))[0] == 401
    assert StoredResponse.objects.count() == 1


def test_another_key_of_the_tenant_finds_it() -> None:
    acme, _ = key_of("acme")
    other = key_create(name="second", tenant="acme", actor="root", now=NOW)
    assert get(kept(acme), {"Authorization": f"Bearer {other.text}"}).status_code == 200


@pytest.mark.parametrize("path", ["resp_none", "resp_%00", "x/y/z", "resp_none/input_items", "resp_" + "0" * 32])
def test_what_is_not_there_is_a_404(path: str) -> None:
    assert error_of(get(path, {}))[0] == 404


def test_other_methods_are_not_allowed() -> None:
    assert Client().post("/v1/responses/resp_none").status_code == 405
    assert Client().get("/v1/responses/resp_none/cancel").status_code == 405
