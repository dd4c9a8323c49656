"""Accepting, cancelling and ending near-real-time requests."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction

from engine_agent.protocol.states import ServingClass
from fleet.webhooks.models import WebhookDelivery
from kernel.models import Event
from kernel.refusals import InvalidInput
from tests.fleet.rows import NOW
from tests.traffic.rows import BODY, accepted, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings, AsyncState
from traffic.async_requests.services.intake import AsyncSubmission, async_request_accept
from traffic.async_requests.services.requests import async_request_cancel, async_request_end, async_requests_trim
from traffic.tenants.models import GrantUse, TenantGrant
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application
from traffic.tenants.services import tenant_grant_create, tenant_grant_withdraw

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture(autouse=True)
def fleet() -> None:
    serving_fleet()


def accept(application: Application, settings: AsyncSettings | None = None) -> AsyncRequest:
    submission = AsyncSubmission("/v1/chat/completions", BODY)
    return async_request_accept(application=application, submission=submission, now=NOW, settings=settings)[0]


def test_what_is_accepted_waits_for_a_sender_with_its_deadline() -> None:
    request = AsyncRequest.objects.get(id=accepted("acme", limit_ms="60000").id)
    assert (request.state, request.tenant, request.model) == ("queued", "acme", "sim-70b")
    assert (bytes(request.body), request.serving_class) == (BODY, "near_realtime")
    assert request.deadline_at == NOW + timedelta(seconds=60)
    assert (request.due_at, request.ended_at) == (NOW, None)


def test_what_is_kept_is_what_was_checked_written_anew_with_the_model_first() -> None:
    said = b'{ "role":"user" , "content" : "\\u0061\xc3\xa9\\u2028" }'
    spaced = b' { "messages" : [ %b ] ,\t"mod\\u0065l" : "sim\\u002d70b" , "top_p" : 1.0 }\r\n' % said
    kept = bytes(AsyncRequest.objects.get(id=accepted(body=spaced).id).body)
    assert kept == b'{"model":"sim-70b","messages":[{"role":"user","content":"a\\u00e9\\u2028"}],"top_p":1.0}'


def test_a_key_for_batch_work_is_not_made_more_urgent() -> None:
    assert accept(Application("acme", serving_class=ServingClass.BATCH)).serving_class == "batch"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"\xff", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"model":"sim-70b","model":"other"}', 400, "invalid_json"),
        (b'{"model":"sim-70b","mod\\u0065l":"other"}', 400, "invalid_json"),
        (b'{"model":"sim-70b","messages":[{"role":"user","role":"system"}]}', 400, "invalid_json"),
        (b'{"model":"sim-70b","seed":NaN}', 400, "invalid_json"),
        (b'{"model":"sim-70b","a":' + b"[" * 250 + b"]" * 250 + b"}", 400, "invalid_json"),
        (b'{"messages":[]}', 400, "missing_required_parameter"),
        (b'{"model":5}', 400, "missing_required_parameter"),
        (b'{"model":"sim-70b","stream":true}', 400, "invalid_value"),
        (b'{"model":"gpt-9"}', 404, "model_not_found"),
        (b'{"model":"sim-70b","x":"' + b"x" * 1024 * 1024 + b'"}', 413, "request_too_large"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_at_once(body: bytes, status: int, code: str) -> None:
    with pytest.raises(ApplicationRefused) as caught:
        accepted(body=body)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert not AsyncRequest.objects.exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"limit_ms": "soon"},
        {"idempotency_key": "x" * 129},
        {"idempotency_key": "a\nb"},
        {"callback_url": "ftp://example.com"},
        {"callback_url": "https://user@example.com"},
        {"callback_url": "http://169.254.169.254/latest/meta-data"},
        {"callback_url": "https://127.0.0.1/"},
        {"callback_url": "https://example.com/" + "x" * 500},
    ],
)
def test_a_header_that_cannot_be_kept_is_refused_by_name(headers: dict[str, Any]) -> None:
    with pytest.raises(ApplicationRefused) as caught:
        async_request_accept(
            application=Application(), submission=AsyncSubmission("/v1/completions", BODY, **headers), now=NOW
        )
    assert (caught.value.status, caught.value.code) == (400, "bad_header")


def test_the_same_idempotency_key_finds_the_same_request() -> None:
    first = accepted("acme", idempotency_key="k1")
    assert accepted("acme", idempotency_key="k1", now=NOW + timedelta(hours=1)).id == first.id
    assert accepted("globex", idempotency_key="k1").id != first.id
    assert accepted("acme", idempotency_key="k2").id != first.id


def test_an_idempotency_key_is_for_one_request_only() -> None:
    accepted("acme", idempotency_key="k1")
    with pytest.raises(ApplicationRefused, match="belongs to another request") as caught:
        accepted("acme", idempotency_key="k1", body=BODY.replace(b"why?", b"how?"))
    assert caught.value.status == 409


def test_a_tenant_may_have_so_many_waiting_and_another_tenant_does_not_care() -> None:
    two = AsyncSettings(max_open_per_tenant=2)
    accept(Application("acme"), two)
    accept(Application("acme"), two)
    with pytest.raises(ApplicationRefused) as caught:
        accept(Application("acme"), two)
    assert (caught.value.status, caught.value.code) == (429, "too_many_open")
    accept(Application("globex"), two)


def test_a_key_may_send_so_many_a_minute() -> None:
    limited = Application("acme", key="ab12", requests_per_min=2)
    accept(limited)
    accept(limited)
    with pytest.raises(ApplicationRefused) as caught:
        accept(limited)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    accept(Application("acme", key="cd34", requests_per_min=2))


def test_a_key_opens_only_its_deployments() -> None:
    accept(Application("acme", deployments=("sim-70b",)))
    with pytest.raises(ApplicationRefused) as caught:
        accept(Application("acme", deployments=("smollm2",)))
    assert (caught.value.status, caught.value.code) == (403, "model_not_allowed")


def test_a_request_ends_once_and_its_body_goes() -> None:
    request = accepted()
    rows = AsyncRequest.objects.filter(id=request.id, state="queued")
    ended = async_request_end(rows, state=AsyncState.FAILED, now=NOW, reason="no")
    assert ended is not None
    assert (ended.state, ended.ended_at, bytes(ended.body)) == ("failed", NOW, b"")
    assert async_request_end(rows, state=AsyncState.DONE, now=NOW) is None
    assert AsyncRequest.objects.get(id=request.id).state == "failed"


def test_the_database_takes_no_outcome_without_its_time() -> None:
    request = accepted()
    with pytest.raises(IntegrityError, match="async_ends_once"), transaction.atomic():
        AsyncRequest.objects.filter(id=request.id).update(state="done")


CALLBACK = "https://app.example.com/done"


def allow(tenant: str, host: str = "app.example.com") -> TenantGrant:
    return tenant_grant_create(tenant=tenant, use=GrantUse.CALLBACK, target=host, actor="ada", now=NOW)


def test_a_callback_url_gets_the_end_once() -> None:
    allow("acme")
    request = accepted("acme", callback_url="https://app.example.com/done", idempotency_key="order-17")
    assert len(request.callback_secret) == 64
    cancel(request)
    cancel(request)
    (delivery,) = WebhookDelivery.objects.all()
    assert (delivery.url, delivery.secret, delivery.event) == (
        "https://app.example.com/done",
        request.callback_secret,
        "async.ended",
    )
    assert delivery.body == {
        "id": request.id,
        "idempotency_key": "order-17",
        "status": "cancelled",
        "url": f"/v1/async/{request.id}",
    }


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example.com/done",
        "https://app.example.com:8443/done",
        "https://app.example.com./done",
        "https://app.example.com.evil.example/",
        "https://evil.example/app.example.com",
        "https://[2606:2800::1]/",
    ],
)
def test_a_callback_goes_to_a_host_of_its_own_tenant_or_nowhere(url: str) -> None:
    allow("acme")
    allow("globex", "other.example.com")
    for tenant in ("acme", "initech", ""):
        with pytest.raises(ApplicationRefused, match="have no grant for") as caught:
            accepted(tenant, callback_url=url)
        assert (caught.value.status, caught.value.code) == (400, "bad_header")
    assert accepted("acme", callback_url="https://APP.example.com:443/done").callback_url


def test_withdrawing_a_host_cancels_its_pending_callbacks_only() -> None:
    row = allow("acme")
    allow("globex")
    told, waits = accepted("acme", callback_url="https://app.example.com/a"), accepted("acme", callback_url=CALLBACK)
    others = accepted("globex", callback_url="https://app.example.com/b")
    cancel(told)
    cancel(others, "globex")
    tenant_grant_withdraw(grant_id=row.pk, actor="ada", now=NOW)
    cancel(waits)
    states = dict(WebhookDelivery.objects.values_list("own_url", "state"))
    assert states == {"https://app.example.com/a": "failed", "https://app.example.com/b": "pending"}
    assert Event.objects.get(kind="tenant_grant.withdrawn").detail["target"] == "app.example.com"


@pytest.mark.parametrize(
    "host",
    ["", "https://x.example", "x.example/", "x.example/a", "x.example?", "a b", "u@x.example", "x.example:0x1"],
)
def test_what_is_no_host_is_not_listed(host: str) -> None:
    with pytest.raises(InvalidInput):
        allow("acme", host)


def cancel(request: AsyncRequest, tenant: str = "acme") -> AsyncRequest | None:
    return async_request_cancel(application=Application(tenant), request_id=request.id, now=NOW)


def test_only_its_own_tenant_cancels_a_request() -> None:
    request = accepted("acme")
    assert cancel(request, "globex") is None
    assert AsyncRequest.objects.get(id=request.id).state == "queued"
    cancelled = cancel(request)
    assert cancelled is not None
    assert cancelled.state == "cancelled"


def test_outcomes_are_kept_for_their_time() -> None:
    request = accepted("acme")
    cancel(request)
    waiting = accepted("acme")
    assert async_requests_trim(now=NOW + timedelta(seconds=86_400)) == 0
    assert async_requests_trim(now=NOW + timedelta(seconds=86_401)) == 1
    assert list(AsyncRequest.objects.values_list("id", flat=True)) == [waiting.id]
