"""Near-real-time requests over HTTP in OpenAI's format: access, answers and ownership."""

import json
from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.asgi import get_asgi_application
from django.http import HttpResponse
from django.test import Client

from controlplane.request_bodies import KnownApplications, RequestBodies
from kernel import clock
from tests.fleet.rows import NOW
from tests.traffic.rows import ANSWER, BODY, serving_fleet
from traffic.async_requests.consumers import AcceptAsync
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncState
from traffic.async_requests.services.group_intake import GroupIntake
from traffic.async_requests.services.requests import async_request_end
from traffic.keys.services import key_create, key_revoke, keys_require
from traffic.tenants.models import GrantUse
from traffic.tenants.selectors import Application, application_of
from traffic.tenants.services import tenant_grant_create

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

CHAT = "/v1/async/chat/completions"


@pytest.fixture(autouse=True)
def fleet() -> None:
    serving_fleet()


def key_of(tenant: str) -> dict[str, str]:
    new = key_create(name=tenant, tenant=tenant, actor="root", now=NOW)
    return {"Authorization": f"Bearer {new.text}"}


async def _in_this_thread(work: Any) -> Any:
    """The thread with the test's transaction."""
    return await sync_to_async(work, thread_sensitive=True)()


async def _application(authorization: str) -> Application:
    found: Application = await _in_this_thread(lambda: application_of(authorization, clock.now()))
    return found


def post(headers: dict[str, str] | None = None, body: bytes = BODY, path: str = CHAT) -> HttpResponse:
    """What web answers, from its first application on."""
    django = cast(Any, get_asgi_application())
    web = RequestBodies(AcceptAsync(django, GroupIntake(in_thread=_in_this_thread)), KnownApplications(_application))
    given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(name.lower().encode(), text.encode()) for name, text in given.items()],
        "client": ("127.0.0.1", 5000), "server": ("127.0.0.1", 80), "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async_to_sync(web)(scope, receive, send)
    own = {name.decode(): text.decode() for name, text in sent[0]["headers"]}
    content_type = own.pop("content-type")
    return HttpResponse(sent[1]["body"], status=sent[0]["status"], headers=own, content_type=content_type)


def code_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, json.loads(answer.content)["error"]["code"]


def test_a_request_is_accepted_and_can_be_polled() -> None:
    answer = post()
    assert answer.status_code == 202
    payload = json.loads(answer.content)
    assert answer["Location"] == f"/v1/async/{payload['id']}"
    assert (payload["object"], payload["status"], payload["endpoint"]) == (
        "async.request",
        "queued",
        "/v1/chat/completions",
    )
    assert payload["deadline_at"] - payload["created_at"] == 900
    polled = Client().get(answer["Location"])
    assert json.loads(polled.content) == payload


def test_an_outcome_is_shown_with_its_status_and_body() -> None:
    asked = b'{"model":"sim-70b","prompt":"why?"}'
    request_id = json.loads(post(path="/v1/async/completions", body=asked).content)["id"]
    rows = AsyncRequest.objects.filter(id=request_id)
    async_request_end(rows, state=AsyncState.DONE, now=NOW, status=200, answer=ANSWER)
    payload = json.loads(Client().get(f"/v1/async/{request_id}").content)
    assert (payload["status"], payload["error"]) == ("done", None)
    assert payload["response"] == {"status_code": 200, "body": json.loads(ANSWER)}
    assert payload["expires_at"] - payload["ended_at"] == 86_400


def test_a_cancelled_request_says_so_and_cannot_be_cancelled_into_anything_else() -> None:
    request_id = json.loads(post().content)["id"]
    for _ in range(2):
        payload = json.loads(Client().delete(f"/v1/async/{request_id}").content)
        assert (payload["status"], payload["error"]["code"], payload["response"]) == ("cancelled", "cancelled", None)


def test_a_callback_gets_its_secret_once() -> None:
    tenant_grant_create(tenant="", use=GrantUse.CALLBACK, target="app.example.com", actor="ada", now=NOW)
    headers = {"X-Switchyard-Callback-Url": "https://app.example.com/done", "Idempotency-Key": "k"}
    first, again = (json.loads(post(headers).content) for _ in range(2))
    assert len(first["callback_secret"]) == 64
    assert again["id"] == first["id"]
    assert "callback_secret" not in again
    assert "callback_secret" not in json.loads(Client().get(f"/v1/async/{first['id']}").content)


def test_a_tenant_sees_and_cancels_only_its_own() -> None:
    acme, globex = key_of("acme"), key_of("globex")
    request_id = json.loads(post(acme).content)["id"]
    for other in (globex, {}):
        assert code_of(Client().get(f"/v1/async/{request_id}", headers=other)) == (404, "not_found")
        assert code_of(Client().delete(f"/v1/async/{request_id}", headers=other)) == (404, "not_found")
    mine = Client().get(f"/v1/async/{request_id}", headers=acme)
    assert json.loads(mine.content)["status"] == "queued"
    assert AsyncRequest.objects.get(id=request_id).tenant == "acme"


def test_where_keys_are_required_requests_without_one_are_refused() -> None:
    acme = key_of("acme")
    keys_require(required=True, actor="root", now=NOW)
    assert code_of(post()) == (401, "missing_api_key")
    assert code_of(post({"Authorization": "Bearer other"})) == (401, "missing_api_key")
    assert code_of(post({"Authorization": "Bearer sw_00000000000000_" + "0" * 48})) == (401, "invalid_api_key")
    assert post(acme).status_code == 202


def test_a_revoked_key_opens_nothing_even_where_none_is_needed() -> None:
    acme = key_of("acme")
    request_id = json.loads(post(acme).content)["id"]
    key_revoke(prefix=acme["Authorization"].split("_")[1], actor="root", now=NOW)
    assert code_of(post(acme)) == (401, "invalid_api_key")
    assert code_of(Client().get(f"/v1/async/{request_id}", headers=acme)) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"n": 0}, "invalid_value", "n"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "why?"}, "invalid_type", "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools"),
        ({"kv_transfer_params": {"a": 1}}, "unsupported_parameter", "kv_transfer_params"),
        ({"store": "x"}, "invalid_type", "store"),
    ],
)
def test_what_the_engine_would_refuse_is_not_accepted(change: dict[str, Any], code: str, param: str) -> None:
    answer = post(body=json.dumps({**json.loads(BODY), **change}).encode())
    assert code_of(answer) == (400, code)
    assert json.loads(answer.content)["error"]["param"] == param
    assert not AsyncRequest.objects.exists()


@pytest.mark.parametrize("change", [{"temperature": 2}, {"tools": []}, {"seed": None}, {"top_k": 5, "extra": "x"}])
def test_what_the_engine_would_answer_is_accepted(change: dict[str, Any]) -> None:
    assert post(body=json.dumps({**json.loads(BODY), **change}).encode()).status_code == 202


def test_a_completion_is_checked_as_one() -> None:
    answer = post(path="/v1/async/completions")
    assert code_of(answer) == (400, "invalid_value")
    assert json.loads(answer.content)["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("sent", "headers", "expected"),
    [
        (b"{", {}, (400, "invalid_json")),
        (b'{"model":"none"}', {}, (404, "model_not_found")),
        (BODY, {"X-Switchyard-Deadline-Ms": "soon"}, (400, "bad_header")),
        (BODY, {"X-Switchyard-Callback-Url": "http://10.0.0.1/"}, (400, "bad_header")),
        (b"x" * 1024 * 1025, {}, (413, "request_too_large")),
    ],
)
def test_what_is_not_accepted_is_said_in_openais_form(
    sent: bytes, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    answer = post(headers, sent)
    assert code_of(answer) == expected
    error: dict[str, Any] = json.loads(answer.content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/async/", "/v1/async/embeddings/x", "/v1/async/ar_none"])
def test_what_is_not_there_is_a_404(path: str) -> None:
    assert Client().get(path).status_code == 404


def test_other_methods_are_not_allowed() -> None:
    for method, path, allowed in (("get", CHAT, "POST"), ("post", "/v1/async/embeddings", "GET, DELETE")):
        answer = getattr(Client(), method)(path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)
        assert answer.json()["error"]["code"] == "method_not_allowed"
    assert Client().head("/v1/async/ar_none").status_code == 404
