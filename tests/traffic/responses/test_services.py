"""Storing, continuing, cancelling and deleting responses."""

import json
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import IntegrityError

from kernel.models import Event
from tests.fleet.rows import NOW
from tests.traffic.rows import ACME, GLOBEX, SENDING, STORE, answer, attempt, begin, in_background, kept, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncState, AttemptResponse
from traffic.async_requests.services.requests import (
    async_request_end,
    async_requests_claim,
    async_requests_expire,
    async_requests_trim,
)
from traffic.keys.planner import sender_key_text
from traffic.responses.models import StoredResponse
from traffic.responses.planner import JsonObject, StoreSettings
from traffic.responses.selectors import (
    chain_of,
    items_of,
    kept_by_tenant,
    kept_in_all,
    kept_of_tenant,
    shown_response,
    stored_response_of,
)
from traffic.responses.services import PassedOn, response_cancel, response_delete, responses_trim
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
NEVER_MADE = "resp_" + "0" * 32
WHOLE = AttemptResponse(200, json.dumps(answer()).encode())


@pytest.fixture(autouse=True)
def fleet() -> None:
    serving_fleet()


def shown(response_id: str, application: Application = ACME) -> JsonObject:
    stored = stored_response_of(application.tenant, response_id, NOW, STORE)
    assert stored is not None
    return shown_response(stored)


def refusal(application: Application = ACME, **more: Any) -> ApplicationRefused:
    with pytest.raises(ApplicationRefused) as caught:
        begin(application, **more)
    return caught.value


def cancel(response_id: str, application: Application = ACME) -> JsonObject:
    return response_cancel(application=application, response_id=response_id, now=NOW, settings=STORE)


def delete(response_id: str, application: Application = ACME) -> JsonObject:
    return response_delete(application=application, response_id=response_id, now=NOW, settings=STORE)


def sent(passed: PassedOn | JsonObject) -> Any:
    assert isinstance(passed, PassedOn)
    return json.loads(passed.body)


# --- waiting applications ---


def test_what_is_passed_on_is_the_keys_and_counted_already() -> None:
    text = sender_key_text(ACME.key, django_settings.SECRET_KEY)
    proof = {"x-switchyard-counted": sha256(text.encode()).hexdigest()}
    passed = begin(store=True, headers={"x-switchyard-class": "batch", "x-other": "1", "cookie": "c", **proof})
    assert isinstance(passed, PassedOn)
    assert (passed.headers["Authorization"], passed.headers["X-Switchyard-Class"]) == ("Bearer sw_x", "batch")
    assert passed.headers["X-Switchyard-Counted"] == text
    assert passed.headers.keys() == {"Authorization", "X-Switchyard-Class", "X-Switchyard-Counted"}
    assert [ingress.region for ingress in passed.ingresses] == ["us-east-1"]
    assert not StoredResponse.objects.exists(), "it is stored once complete"


@pytest.mark.parametrize("proof", [{}, {"x-switchyard-counted": "1"}, {"x-switchyard-counted": "sw_x\xe9"}])
def test_what_no_ingress_has_counted_is_counted_where_it_is_sent(proof: dict[str, str]) -> None:
    passed = begin(store=True, headers=proof)
    assert isinstance(passed, PassedOn)
    assert "X-Switchyard-Counted" not in passed.headers


def test_a_response_is_kept_with_its_input_for_its_tenant() -> None:
    noted = Event.objects.count()
    response_id = kept()
    row = StoredResponse.objects.get()
    assert (row.tenant, row.key, row.state, row.turns, row.previous) == ("acme", "0a0a0a0a", "completed", 1, "")
    assert items_of(row) == ({"type": "message", "role": "user", "content": "hi"},)
    assert shown(response_id) == {
        **answer(),
        "id": response_id,
        "store": True,
        "background": False,
        "previous_response_id": None,
    }
    assert Event.objects.count() == noted, "applications' actions are not in the timeline"


def test_a_conversation_continues_from_every_turn() -> None:
    first = kept(input="one", text="1")
    second = kept(input="two", text="2", previous_response_id=first)
    texts = [
        item["content"] if isinstance(item["content"], str) else item["content"][0]["text"]
        for item in sent(begin(previous_response_id=second, input="three"))["input"]
    ]
    assert texts == ["one", "1", "two", "2", "three"]
    branch = sent(begin(previous_response_id=first, input="else"))["input"]
    assert len(branch) == 3
    assert StoredResponse.objects.get(id=second).turns == 2


def test_what_is_not_to_be_kept_may_follow_what_is() -> None:
    passed = begin(previous_response_id=kept(), store=False)
    assert isinstance(passed, PassedOn)
    assert not passed.request.is_kept


# --- ownership and deletion ---


def test_nothing_of_another_tenant_is_found() -> None:
    mine, waiting = kept(), in_background()
    for response_id in (mine, waiting):
        assert stored_response_of("globex", response_id, NOW, STORE) is None
        for call in (cancel, delete):
            with pytest.raises(ApplicationRefused, match="not found") as caught:
                call(response_id, GLOBEX)
            assert caught.value.status == 404
        other = refusal(GLOBEX, previous_response_id=response_id)
        assert (other.status, other.code) == (400, "previous_response_not_found")
        missing = refusal(GLOBEX, previous_response_id=NEVER_MADE)
        assert str(other).replace(response_id, "") == str(missing).replace(NEVER_MADE, "")
    assert StoredResponse.objects.count() == 2


@pytest.mark.parametrize(
    "guess", ["resp_", "resp_%", "resp_" + "0" * 31, "ar_" + "0" * 32, "resp_\0", "x" * 5000, "\ud800"]
)
def test_what_is_no_id_is_not_looked_for(guess: str, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert stored_response_of("acme", guess, NOW, STORE) is None


def test_nothing_follows_what_is_deleted_or_has_lost_a_turn() -> None:
    first = kept()
    second = kept(previous_response_id=first)
    third = kept(previous_response_id=second)
    assert delete(second) == {"id": second, "object": "response", "deleted": True}
    for gone in (second, third):
        assert refusal(previous_response_id=gone).code == "previous_response_not_found"
    assert shown(third)["status"] == "completed"
    assert sent(begin(previous_response_id=first))["input"]


def test_what_expired_is_gone_for_every_call_before_it_is_trimmed() -> None:
    first = kept(now=NOW - timedelta(days=29))
    second = kept(previous_response_id=first)
    later = NOW + timedelta(days=2)
    assert stored_response_of("acme", first, later, STORE) is None
    assert refusal(previous_response_id=first, now=later).code == "previous_response_not_found"
    assert refusal(previous_response_id=second, now=later).code == "previous_response_not_found"
    assert responses_trim(now=later, settings=STORE) == 1
    assert StoredResponse.objects.get().id == second


def test_rows_that_follow_each_other_in_a_circle_end_nowhere() -> None:
    first = kept()
    second = kept(previous_response_id=first)
    StoredResponse.objects.filter(id=first).update(previous=second)
    last = StoredResponse.objects.get(id=second)
    assert chain_of(last, NOW, STORE) is None
    assert refusal(previous_response_id=second).code == "previous_response_not_found"


def test_a_chain_is_bounded_in_turns_and_bytes() -> None:
    first = kept(input="x" * 600_000)
    assert "longer than" in str(refusal(previous_response_id=first, input="y" * 600_000))
    assert "has 1 turns" in str(refusal(previous_response_id=first, settings=replace(STORE, max_turns=1)))


# --- in the background ---


def test_a_response_in_the_background_is_queued_then_made_then_there() -> None:
    response_id = in_background(metadata={"a": "b"}, headers={"x-switchyard-deadline-ms": "60000"})
    assert (shown(response_id)["status"], shown(response_id)["background"]) == ("queued", True)
    request = AsyncRequest.objects.get()
    assert (request.path, request.deadline_at) == ("/v1/responses", NOW + timedelta(seconds=60))
    (leased,) = async_requests_claim(count=1, rooms={}, now=NOW, settings=SENDING)
    assert json.loads(leased.body) == {"model": "sim-70b", "input": "hi", "metadata": {"a": "b"}, "store": False}
    assert shown(response_id)["status"] == "in_progress"
    ended = AsyncRequest.objects.filter(id=request.id)
    assert async_request_end(ended, state=AsyncState.DONE, now=NOW, status=200, answer=WHOLE.body)
    assert shown(response_id)["status"] == "completed"
    assert shown(response_id)["output"] == answer()["output"]
    assert AsyncRequest.objects.get().answer is None, "it is stored once"
    assert kept_of_tenant("acme")[1] == StoredResponse.objects.get().bytes


def test_one_that_takes_long_says_that_it_is_made_between_two_attempts() -> None:
    response_id = in_background()
    attempt(AttemptResponse(503, b"{}"))
    assert AsyncRequest.objects.get().state == "queued"
    assert shown(response_id)["status"] == "in_progress"


def test_a_refused_one_fails_with_what_the_engine_said() -> None:
    response_id = in_background()
    attempt(AttemptResponse(400, b'{"error":{"message":"too long"}}'))
    assert shown(response_id)["status"] == "failed"
    assert shown(response_id)["error"] == {"code": "server_error", "message": "answered 400: too long"}
    assert refusal(previous_response_id=response_id).code == "previous_response_not_completed"


def test_a_late_one_fails() -> None:
    response_id = in_background()
    assert async_requests_expire(now=NOW + timedelta(hours=2)) == 1
    assert shown(response_id)["status"] == "failed"


def test_one_that_follows_another_and_is_followed() -> None:
    first = in_background(input="one")
    assert refusal(previous_response_id=first).code == "previous_response_not_completed"
    attempt(WHOLE)
    second = in_background(input="two", previous_response_id=first)
    assert len(json.loads(attempt(WHOLE))["input"]) == 3
    assert shown(second)["previous_response_id"] == first
    assert len(sent(begin(previous_response_id=second))["input"]) == 5


def test_cancelling_is_done_once_and_stays_done() -> None:
    response_id = in_background()
    async_requests_claim(count=1, rooms={}, now=NOW, settings=SENDING)
    assert cancel(response_id)["status"] == "cancelled"
    assert cancel(response_id)["status"] == "cancelled"
    assert AsyncRequest.objects.get().state == "cancelled"
    done = in_background()
    attempt(WHOLE)
    assert cancel(done)["status"] == "completed"


def test_what_was_waited_for_is_not_cancelled() -> None:
    with pytest.raises(ApplicationRefused, match="Cannot cancel a synchronous response") as caught:
        cancel(kept())
    assert caught.value.status == 400


def test_deleting_one_that_is_made_cancels_it() -> None:
    response_id = in_background()
    delete(response_id)
    assert (AsyncRequest.objects.get().state, StoredResponse.objects.count()) == ("cancelled", 0)
    with pytest.raises(ApplicationRefused, match="not found"):
        delete(response_id)


def test_it_outlives_the_request_that_made_it() -> None:
    response_id = in_background()
    attempt(WHOLE)
    assert async_requests_trim(now=NOW + timedelta(days=2)) == 1
    assert shown(response_id)["status"] == "completed"
    assert cancel(response_id)["status"] == "completed"


def test_the_same_idempotency_key_finds_the_same_response() -> None:
    headers = {"idempotency-key": "k"}
    first = in_background(headers=headers)
    assert in_background(headers=headers) == first
    assert refusal(background=True, input="other", headers=headers).code == "idempotency_conflict"
    assert in_background(GLOBEX, headers=headers) != first
    delete(first)
    assert refusal(background=True, headers=headers).status == 409


def test_a_refused_one_leaves_nothing() -> None:
    assert refusal(background=True, model="none").status == 404
    assert refusal(background=True, headers={"x-switchyard-callback-url": "https://x.example"}).code == "bad_header"
    assert refusal(Application("acme", deployments=("other",)), background=True).status == 403
    assert not AsyncRequest.objects.exists()


# --- limits ---


@pytest.mark.parametrize("bound", [{"max_kept_per_tenant": 1}, {"max_kept_bytes_per_tenant": 1}])
def test_a_tenant_has_room_for_so_much(bound: dict[str, int]) -> None:
    first, settings = kept(), replace(STORE, **bound)
    full = refusal(store=True, settings=settings)
    assert (full.status, full.code) == (429, "too_many_responses_kept")
    assert refusal(background=True, settings=settings).status == 429
    begin(store=False, previous_response_id=first, settings=settings)
    begin(GLOBEX, store=True, settings=settings)
    delete(first)
    begin(store=True, settings=settings)


def test_a_store_that_is_off_keeps_and_finds_nothing() -> None:
    response_id, off = kept(), StoreSettings(kept_s=0.0)
    for members in ({"store": True}, {"background": True}, {"previous_response_id": response_id, "store": False}):
        assert refusal(settings=off, **members).code == "unsupported_parameter"
    assert stored_response_of("acme", response_id, NOW, off) is None
    assert responses_trim(now=NOW, settings=off) == 1


def test_what_is_kept_is_counted_by_tenant() -> None:
    kept()
    kept(GLOBEX, now=NOW - timedelta(days=1))
    kept(GLOBEX)
    globex, acme = kept_by_tenant(most=2)
    assert (acme.tenant, acme.responses, globex.tenant, globex.responses) == ("acme", 1, "globex", 2)
    assert globex.oldest_at == NOW - timedelta(days=1)
    assert (acme.responses, acme.size) == kept_of_tenant("acme")
    assert kept_in_all() == (3, acme.size + globex.size)
    assert kept_by_tenant(most=1) == [globex]
    assert kept_by_tenant(most=2, tenant="acme") == [acme]


def test_only_what_is_made_in_the_background_may_be_unfinished() -> None:
    kept()
    with pytest.raises(IntegrityError):
        StoredResponse.objects.update(state="in_progress", ended_at=None)
