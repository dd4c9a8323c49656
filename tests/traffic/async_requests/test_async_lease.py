"""Leases of near-real-time requests and their results, on a virtual clock."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from tests.fleet.rows import NOW
from tests.traffic.rows import ANSWER, accepted, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings, AttemptResponse
from traffic.async_requests.services import requests
from traffic.async_requests.services.requests import (
    LeasedRequest,
    async_attempts_settle,
    async_lease_release,
    async_leases_renew,
    async_request_cancel,
    async_requests_claim,
    async_requests_expire,
)
from traffic.tenants.selectors import Application

pytestmark = pytest.mark.django_db

SETTINGS = AsyncSettings(lease_s=15.0, max_sending_per_tenant=2)


@pytest.fixture(autouse=True)
def fleet() -> None:
    serving_fleet()


def claim(count: int = 10, now: datetime = NOW, full: tuple[str, ...] = ()) -> list[LeasedRequest]:
    return async_requests_claim(count=count, rooms=dict.fromkeys(full, 0), now=now, settings=SETTINGS)


def settle(leased: LeasedRequest, received: AttemptResponse, now: datetime = NOW) -> str | None:
    (verdict,) = async_attempts_settle(attempts=[(leased, received)], now=now, settings=SETTINGS)
    return verdict.state.value if verdict else None


def state_of(request: AsyncRequest) -> str:
    return AsyncRequest.objects.get(id=request.id).state


def test_a_request_is_leased_to_one_sender() -> None:
    request = accepted("acme")
    (leased,) = claim()
    assert (leased.id, leased.tenant, leased.attempts, leased.path) == (request.id, "acme", 1, "/v1/chat/completions")
    assert bytes(request.body) == leased.body
    assert claim() == []


def test_a_lease_that_was_not_renewed_is_taken_over_and_the_first_sender_is_not_heard() -> None:
    request = accepted()
    (first,) = claim()
    assert claim(now=NOW + timedelta(seconds=14)) == []
    (second,) = claim(now=NOW + timedelta(seconds=15))
    assert (second.id, second.attempts) == (first.id, 2)
    assert async_leases_renew(leased=[first, second], now=NOW, settings=SETTINGS) == {second}
    assert settle(first, AttemptResponse(200, b'{"late":1}')) is None
    assert settle(second, AttemptResponse(200, ANSWER)) == "done"
    assert bytes(AsyncRequest.objects.get(id=request.id).answer or b"") == ANSWER


def test_a_renewed_lease_is_not_taken_over() -> None:
    accepted()
    leased = claim()
    async_leases_renew(leased=leased, now=NOW + timedelta(seconds=10), settings=SETTINGS)
    assert claim(now=NOW + timedelta(seconds=20)) == []


def test_an_attempt_that_failed_is_made_again_after_a_pause() -> None:
    request = accepted()
    (leased,) = claim()
    assert settle(leased, AttemptResponse(503)) == "queued"
    assert claim(now=NOW + timedelta(seconds=0.4)) == []
    (again,) = claim(now=NOW + timedelta(seconds=0.5))
    assert (again.attempts, again.failures) == (2, 0)
    assert settle(again, AttemptResponse(500)) == "queued"
    assert AsyncRequest.objects.get(id=request.id).failures == 1


def test_what_is_given_back_is_due_at_once() -> None:
    accepted()
    (leased,) = claim()
    assert async_lease_release(leased=leased, now=NOW)
    assert not async_lease_release(leased=leased, now=NOW)
    assert claim()[0].attempts == 2


def test_a_cancelled_request_has_no_other_outcome() -> None:
    request = accepted("acme")
    (leased,) = claim()
    async_request_cancel(application=Application("acme"), request_id=request.id, now=NOW)
    assert async_leases_renew(leased=[leased], now=NOW, settings=SETTINGS) == set()
    assert settle(leased, AttemptResponse(200, ANSWER)) is None
    assert state_of(request) == "cancelled"


def test_tenants_take_turns_and_each_has_its_bound() -> None:
    for second in range(5):
        accepted("acme", now=NOW - timedelta(seconds=60 - second))
    accepted("globex")
    assert [leased.tenant for leased in claim(2)] == ["acme", "globex"]
    assert [leased.tenant for leased in claim()] == ["acme"]
    assert claim() == []


def test_the_concurrency_of_a_key_counts_where_it_is_lower() -> None:
    for _ in range(3):
        request = accepted("acme")
        AsyncRequest.objects.filter(id=request.id).update(max_concurrent=1)
    assert len(claim()) == 1


def test_a_target_that_has_too_much_is_left_alone() -> None:
    accepted()
    assert claim(full=("us-east-1 sim-70b",)) == []
    assert len(claim(full=("us-east-1 other",))) == 1


def test_an_unsent_request_expires_at_its_deadline() -> None:
    waiting, sending = accepted("a", limit_ms="1000"), accepted("b", limit_ms="1000")
    AsyncRequest.objects.filter(id=waiting.id).update(due_at=NOW + timedelta(hours=1))
    (leased,) = claim()
    late = NOW + timedelta(seconds=1)
    assert async_requests_expire(now=late) == 1
    assert (state_of(waiting), state_of(sending)) == ("expired", "sending")
    assert settle(leased, AttemptResponse(504), now=late) == "expired"
    assert async_requests_expire(now=late) == 0


def test_what_a_dead_sender_had_expires_too() -> None:
    request = accepted(limit_ms="1000")
    claim()
    assert async_requests_expire(now=NOW + timedelta(seconds=14)) == 0
    assert async_requests_expire(now=NOW + timedelta(seconds=15)) == 1
    assert state_of(request) == "expired"


def test_an_error_answer_is_kept_and_a_broken_one_is_not() -> None:
    refused, broken = accepted("a"), accepted("b")
    by_tenant = {leased.tenant: leased for leased in claim()}
    assert settle(by_tenant["a"], AttemptResponse(400, b'{"error":{"message":"no\\u0000"}}')) == "failed"
    assert settle(by_tenant["b"], AttemptResponse(None, reason="it broke off\0")) == "queued"
    row = AsyncRequest.objects.get(id=refused.id)
    assert (row.status, row.reason) == (400, "answered 400: no\ufffd")
    assert AsyncRequest.objects.get(id=broken.id).answer is None


def test_rows_are_locked_by_their_id_while_the_planner_knows_no_statistics() -> None:
    accepted()
    arguments: dict[str, Any] = {"now": NOW, "until": NOW, "per_tenant": 2, "full": [], "targets": [], "rooms": [],
                                 "first_room": 8, "count": 4}  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {requests._CLAIM}", arguments)
        plan = "\n".join(line for (line,) in cursor.fetchall())
    locked = plan.partition("CTE locked")[2].partition("CTE leased")[0]
    assert "async_deadline" not in locked
    assert "async_turn" not in locked
