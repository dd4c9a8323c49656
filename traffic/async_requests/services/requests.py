"""Accepts, cancels, leases and ends near-real-time requests. A request is in the database before its response is sent,
and ends once: each end names the initial state, and only the first applies. It ends a stored response in the same
transaction. Each step of a lease is one statement or transaction; if a sender dies between two, another continues after
the lease. It never calls an ingress."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction
from django.db.models import Q, QuerySet

from fleet.webhooks.services import delivery_create_to
from traffic.async_requests.models import OPEN_STATES, AsyncRequest
from traffic.async_requests.planner import (
    AsyncSettings,
    AsyncState,
    AttemptResponse,
    Verdict,
    evaluate_attempt,
)
from traffic.async_requests.selectors import (
    async_request_of,
)
from traffic.responses.models import OPEN_RESPONSE_STATES, StoredResponse
from traffic.responses.planner import ResponseState, ended_response, state_of
from traffic.tenants.selectors import Application, callback_refusal

RESPONSES_PATH = "/v1/responses"


def response_end(request: AsyncRequest, now: datetime) -> None:
    """Records how the request ended and takes over its answer, once."""
    stored = StoredResponse.objects.select_for_update().filter(request=request, state__in=OPEN_RESPONSE_STATES).first()
    answer = _answer_of(request)
    request.answer = None
    if stored is None:
        return
    state = _response_state(AsyncState(request.state), answer)
    shown = ended_response(json.loads(bytes(stored.response)), state, request.reason, answer)
    stored.response = json.dumps(shown, separators=(",", ":")).encode()
    stored.bytes = len(stored.input) + len(stored.response)
    stored.state, stored.ended_at = state.value, now
    stored.save(update_fields=["response", "bytes", "state", "ended_at"])


def _response_state(ended: AsyncState, answer: object) -> ResponseState:
    match ended:
        case AsyncState.DONE:
            return state_of(answer)
        case AsyncState.CANCELLED:
            return ResponseState.CANCELLED
    return ResponseState.FAILED


def _answer_of(request: AsyncRequest) -> object:
    if request.answer is None:
        return None
    try:
        return json.loads(bytes(request.answer))
    except ValueError:
        return None


ENDED_EVENT = "async.ended"
"""Event sent to the callback URL of a request."""


def async_request_cancel(*, application: Application, request_id: str, now: datetime) -> AsyncRequest | None:
    """Cancels a request that has not ended. Returns its present state, or None if the tenant has no such request."""
    rows = AsyncRequest.objects.filter(id=request_id, tenant=application.tenant, state__in=OPEN_STATES)
    async_request_end(rows, state=AsyncState.CANCELLED, now=now, reason="cancelled by its application")
    return async_request_of(application, request_id)


def async_request_end(
    rows: "QuerySet[AsyncRequest]", *, state: AsyncState, now: datetime, **columns: Any
) -> AsyncRequest | None:
    """Ends the request that `rows` selects by ID and state, and notifies its callback URL, in one transaction. Returns
    it, or None if it is not in that state."""
    with transaction.atomic():
        request = rows.select_for_update().first()
        if request is None:
            return None
        for column, value in {
            "state": state.value,
            "ended_at": now,
            "leased_until": None,
            "body": b"",
            **columns,
        }.items():
            setattr(request, column, value)
        if request.path == RESPONSES_PATH:
            response_end(request, now)
        request.save()
        if request.callback_url and not callback_refusal(request.tenant, request.callback_url):
            delivery_create_to(
                url=request.callback_url,
                secret=request.callback_secret,
                event=ENDED_EVENT,
                body={
                    "id": request.id,
                    "idempotency_key": request.idempotency_key,
                    "status": state.value,
                    "url": f"/v1/async/{request.id}",
                },
                now=now,
            )
    return request


def async_requests_trim(*, now: datetime, settings: AsyncSettings | None = None) -> int:
    """Deletes outcomes after their retention, which is longer for those that a results topic lacks. Returns their
    number."""
    chosen = settings or AsyncSettings()
    ended = AsyncRequest.objects.filter(ended_at__lt=now - timedelta(seconds=chosen.kept_s))
    is_done = Q(results_to=None) | Q(published_at__isnull=False)
    return ended.filter(is_done | Q(ended_at__lt=now - timedelta(seconds=chosen.unpublished_kept_s))).delete()[0]


MAX_AT_ONCE = 100
"""Requests that one pass expires."""
_CLAIM = """
WITH busy AS (
    SELECT tenant, count(*) AS sending FROM traffic_asyncrequest
    WHERE ended_at IS NULL AND state = 'sending' AND leased_until > %(now)s GROUP BY tenant
), ranked AS (
    SELECT waiting.id, waiting.due_at,
        row_number() OVER (PARTITION BY waiting.tenant ORDER BY waiting.due_at, waiting.id)
            + coalesce(busy.sending, 0) AS turn,
        CASE WHEN waiting.max_concurrent > 0 THEN least(waiting.max_concurrent, %(per_tenant)s)
             ELSE %(per_tenant)s END AS most
    FROM traffic_asyncrequest waiting LEFT JOIN busy USING (tenant)
    WHERE {waiting} AND NOT ((waiting.region_id || ' ' || waiting.model) = ANY(%(full)s))
), chosen AS (
    SELECT waiting.id, ranked.turn, ranked.due_at FROM traffic_asyncrequest waiting JOIN ranked USING (id)
    WHERE ranked.turn <= ranked.most AND {waiting}
    ORDER BY ranked.turn, ranked.due_at LIMIT %(count)s
    FOR UPDATE OF waiting SKIP LOCKED
), leased AS (
    UPDATE traffic_asyncrequest request
    SET state = 'sending', leased_until = %(until)s, attempts = attempts + 1
    FROM chosen WHERE request.id = chosen.id
    RETURNING request.*, chosen.turn, chosen.due_at AS was_due_at
)
SELECT id, tenant, key, region_id, path, model, serving_class, body, attempts, failures, deadline_at
FROM leased ORDER BY turn, was_due_at
""".format(  # noqa: S608 - the condition is the constant below
    waiting="""waiting.ended_at IS NULL AND waiting.deadline_at > %(now)s
        AND ((waiting.state = 'queued' AND waiting.due_at <= %(now)s)
             OR (waiting.state = 'sending' AND waiting.leased_until <= %(now)s))"""
)
"""Tenants take turns, so that a large queue delays only its own tenant."""


@dataclass(frozen=True, slots=True)
class LeasedRequest:
    """A request that this sender has leased. `attempts` numbers the attempt and is its fence."""

    id: str
    tenant: str
    key: str
    region: str
    path: str
    model: str
    serving_class: str
    body: bytes
    attempts: int
    failures: int
    deadline_at: datetime

    @property
    def target(self) -> str:
        """The model and region that may be overloaded."""
        return f"{self.region} {self.model}"


def async_requests_claim(
    *, count: int, full: Collection[str], now: datetime, settings: AsyncSettings
) -> list[LeasedRequest]:
    """Leases at most `count` requests that are due or whose lease has ended, except those of `full` targets."""
    arguments: dict[str, Any] = {
        "now": now,
        "until": now + timedelta(seconds=settings.lease_s),
        "per_tenant": settings.max_sending_per_tenant,
        "full": list(full),
        "count": count,
    }
    with connection.cursor() as cursor:
        cursor.execute(_CLAIM, arguments)
        return [_leased_request(*columns) for columns in cursor.fetchall()]


def _leased_request(*columns: Any) -> LeasedRequest:
    id, tenant, key, region, path, model, serving_class, body, *rest = columns
    return LeasedRequest(id, tenant, key, region, path, model, serving_class, bytes(body), *rest)


def async_leases_renew(
    *, leased: Iterable[LeasedRequest], now: datetime, settings: AsyncSettings
) -> set[LeasedRequest]:
    """Renews these leases. Returns those that still hold; the other requests ended, or another sender has them."""
    until = now + timedelta(seconds=settings.lease_s)
    return {each for each in leased if _leased_rows(each).update(leased_until=until)}


def async_lease_release(*, leased: LeasedRequest, now: datetime) -> bool:
    """Releases unfinished work for other senders."""
    return _leased_rows(leased).update(state=AsyncState.QUEUED.value, leased_until=None, due_at=now) > 0


def async_attempt_settle(
    *, leased: LeasedRequest, received: AttemptResponse, now: datetime, settings: AsyncSettings
) -> Verdict | None:
    """Records an attempt. Returns its meaning, or None if the lease was lost."""
    verdict = evaluate_attempt(
        received,
        attempts=leased.attempts,
        failures=leased.failures,
        deadline_at=leased.deadline_at,
        now=now,
        settings=settings,
    )
    noted: dict[str, Any] = {
        "status": received.status,
        "reason": verdict.reason.replace("\0", "\ufffd"),
        "failures": leased.failures + verdict.counts,
    }
    if verdict.state is AsyncState.QUEUED:
        noted |= {"state": verdict.state.value, "leased_until": None, "due_at": verdict.due_at}
        return verdict if _leased_rows(leased).update(**noted) else None
    if verdict.state in {AsyncState.DONE, AsyncState.FAILED}:
        noted["answer"] = received.body
    ended = async_request_end(_leased_rows(leased), state=verdict.state, now=now, **noted)
    return verdict if ended is not None else None


def async_requests_open() -> bool:
    """Whether any request is open, from an index."""
    return AsyncRequest.objects.filter(ended_at=None).exists()


def async_requests_expire(*, now: datetime) -> int:
    """Ends unleased requests past their deadline. Returns their number, at most `MAX_AT_ONCE`."""
    unleased = Q(state=AsyncState.QUEUED.value) | Q(state=AsyncState.SENDING.value, leased_until__lte=now)
    late = AsyncRequest.objects.filter(unleased, ended_at=None, deadline_at__lte=now)
    ids = list(late.order_by("deadline_at").values_list("id", flat=True)[:MAX_AT_ONCE])
    reason = "the deadline passed before an answer"
    ended = [async_request_end(late.filter(id=each), state=AsyncState.EXPIRED, now=now, reason=reason) for each in ids]
    return sum(request is not None for request in ended)


def _leased_rows(leased: LeasedRequest) -> "QuerySet[AsyncRequest]":
    return AsyncRequest.objects.filter(id=leased.id, state=AsyncState.SENDING.value, attempts=leased.attempts)
