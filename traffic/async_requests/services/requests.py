"""Cancels, leases and ends near-real-time requests. A request ends once: each end names the initial state, and only the
first applies. It ends a stored response in the same transaction. Leases and outcomes of a group are one statement each;
if a sender dies between two, another continues after the lease. It never calls an ingress."""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import connection, transaction
from django.db.models import Q, QuerySet

from fleet.webhooks.services import delivery_create_to
from kernel.array_text import array_text
from traffic.async_requests.models import OPEN_STATES, AsyncRequest
from traffic.async_requests.planner import (
    AsyncSettings,
    AsyncState,
    AttemptResponse,
    Verdict,
    Window,
    evaluate_attempt,
)
from traffic.async_requests.selectors import (
    async_request_of,
)
from traffic.async_requests.services.body_groups import bodies_store
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
    except (ValueError, RecursionError):
        return None


TRIMMED_AT_ONCE = 5000
"""Rows of one statement: a day may have had millions."""
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
            "body_at": "",
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
    """Deletes outcomes after their retention, which is longer for those that a results topic or a sink lacks. Returns
    their number."""
    chosen = settings or AsyncSettings()
    ended = AsyncRequest.objects.filter(ended_at__lt=now - timedelta(seconds=chosen.kept_s))
    is_published = Q(results_to=None) | Q(published_at__isnull=False)
    is_delivered = Q(sink=None) | Q(delivery__state="delivered")
    is_over = Q(ended_at__lt=now - timedelta(seconds=chosen.unpublished_kept_s))
    gone = ended.filter((is_published & is_delivered) | is_over)
    total = 0
    while ids := list(gone.order_by("ended_at").values_list("id", flat=True)[:TRIMMED_AT_ONCE]):
        StoredResponse.objects.filter(request__in=ids).update(request=None)
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM traffic_asyncrequest WHERE id = ANY(%s)", [ids])
            total += cursor.rowcount
    return total


MAX_AT_ONCE = 100
"""Requests that one pass expires."""
_FREE = """((waiting.state = 'queued' AND waiting.due_at <= %(now)s)
        OR (waiting.state = 'sending' AND waiting.leased_until <= %(now)s))"""
_CLAIM = """
WITH RECURSIVE tenants AS (
    (SELECT tenant FROM traffic_asyncrequest WHERE ended_at IS NULL ORDER BY tenant LIMIT 1)
    UNION ALL
    SELECT (SELECT later.tenant FROM traffic_asyncrequest later
            WHERE later.ended_at IS NULL AND later.tenant > tenants.tenant ORDER BY later.tenant LIMIT 1)
    FROM tenants WHERE tenants.tenant IS NOT NULL
), busy AS (
    SELECT tenant, count(*) AS sending FROM traffic_asyncrequest
    WHERE state = 'sending' AND leased_until > %(now)s GROUP BY tenant
), ranked AS (
    SELECT oldest.id, oldest.due_at, oldest.target,
        row_number() OVER (PARTITION BY tenants.tenant ORDER BY oldest.due_at, oldest.id)
            + coalesce(busy.sending, 0) AS turn,
        CASE WHEN oldest.max_concurrent > 0 THEN least(oldest.max_concurrent, %(per_tenant)s)
             ELSE %(per_tenant)s END AS most
    FROM tenants LEFT JOIN busy USING (tenant) CROSS JOIN LATERAL (
        SELECT waiting.id, waiting.due_at, waiting.max_concurrent, waiting.region_id || ' ' || waiting.model AS target
        FROM traffic_asyncrequest waiting
        WHERE waiting.tenant = tenants.tenant AND {waiting}
            AND NOT ((waiting.region_id || ' ' || waiting.model) = ANY(%(full)s))
        ORDER BY waiting.due_at, waiting.id
        LIMIT least(%(count)s, greatest(0, %(per_tenant)s - coalesce(busy.sending, 0)))
    ) oldest
), placed AS (
    SELECT id, turn, due_at, target, row_number() OVER (PARTITION BY target ORDER BY turn, due_at) AS place
    FROM ranked WHERE turn <= most
), chosen AS (
    SELECT placed.id, placed.turn, placed.due_at FROM placed
        LEFT JOIN unnest(%(targets)s::text[], %(rooms)s::int[]) AS known (target, room)
            ON known.target = placed.target
    WHERE placed.place <= coalesce(known.room, %(first_room)s)
    ORDER BY placed.turn, placed.due_at LIMIT %(count)s
), locked AS (
    SELECT waiting.id FROM traffic_asyncrequest waiting
    WHERE waiting.id = ANY(ARRAY(SELECT id FROM chosen)) AND {free}
    FOR UPDATE SKIP LOCKED
), leased AS (
    UPDATE traffic_asyncrequest request
    SET state = 'sending', leased_until = %(until)s, attempts = attempts + 1
    WHERE request.id = ANY(ARRAY(SELECT id FROM locked))
    RETURNING request.*
)
SELECT leased.id, tenant, key, region_id, path, model, serving_class, body, attempts, failures, deadline_at,
    callback_url = '' AND path <> '{responses}', body_at
FROM leased JOIN chosen ON chosen.id = leased.id ORDER BY chosen.turn, chosen.due_at
""".format(  # noqa: S608 - the condition and the path are constants
    waiting=f"waiting.ended_at IS NULL AND waiting.deadline_at > %(now)s AND {_FREE}",
    free=_FREE,
    responses=RESPONSES_PATH,
)
"""Tenants take turns, so that a large queue delays only its own tenant. A pass reads at most `count` rows of each, and
no more than may be sent for it, so its cost does not grow with the queue. `locked` finds rows by their IDs, and names
no column of another index: with old statistics, the planner expects one open row and would read all of them."""


class LeasedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that this sender has leased. `attempts` numbers the attempt and is its fence. `is_plain`: its end
    changes no other row, so it can be recorded in a group. `body_at`: where the body is, if not here."""

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
    is_plain: bool = False
    body_at: str = ""

    @property
    def target(self) -> str:
        """The model and region that may be overloaded."""
        return f"{self.region} {self.model}"


def async_requests_claim(
    *, count: int, rooms: Mapping[str, int], now: datetime, settings: AsyncSettings
) -> list[LeasedRequest]:
    """Leases at most `count` requests that are due or whose lease has ended. `rooms`: how many more each target takes;
    others take a new window."""
    arguments: dict[str, Any] = {
        "now": now,
        "until": now + timedelta(seconds=settings.lease_s),
        "per_tenant": settings.max_sending_per_tenant,
        "full": [target for target, room in rooms.items() if room <= 0],
        "targets": list(rooms),
        "rooms": list(rooms.values()),
        "first_room": int(Window.FIRST),
        "count": count,
    }
    with connection.cursor() as cursor:
        cursor.execute(_CLAIM, arguments)
        return [_leased_request(*columns) for columns in cursor.fetchall()]


def _leased_request(*columns: Any) -> LeasedRequest:
    id, tenant, key, region, path, model, serving_class, body, *rest = columns
    return LeasedRequest(id, tenant, key, region, path, model, serving_class, bytes(body), *rest)


_RENEW = """
UPDATE traffic_asyncrequest request SET leased_until = %(until)s
FROM unnest(%(ids)s::text[], %(attempts)s::int[]) AS held (id, attempts)
WHERE request.id = held.id AND request.attempts = held.attempts AND request.state = 'sending'
RETURNING request.id, request.attempts
"""


def async_leases_renew(
    *, leased: Collection[LeasedRequest], now: datetime, settings: AsyncSettings
) -> set[LeasedRequest]:
    """Renews these leases. Returns those that still hold; the other requests ended, or another sender has them."""
    ordered = sorted(leased, key=lambda each: each.id)
    arguments: dict[str, Any] = {
        "until": now + timedelta(seconds=settings.lease_s),
        "ids": [each.id for each in ordered],
        "attempts": [each.attempts for each in ordered],
    }
    with connection.cursor() as cursor:
        cursor.execute(_RENEW, arguments)
        held = set(cursor.fetchall())
    return {each for each in ordered if (each.id, each.attempts) in held}


def async_lease_release(*, leased: LeasedRequest, now: datetime) -> bool:
    """Releases unfinished work for other senders."""
    return _leased_rows(leased).update(state=AsyncState.QUEUED.value, leased_until=None, due_at=now) > 0


_SAID = {
    "id": "text", "attempts": "int", "state": "text", "status": "int", "reason": "text", "failures": "int",
    "answer": "bytea", "answer_at": "text", "due_at": "timestamptz",
}  # fmt: skip
_SETTLE = """
UPDATE traffic_asyncrequest request SET state = said.state, status = said.status, reason = said.reason,
    failures = said.failures, answer = said.answer, leased_until = NULL, due_at = coalesce(said.due_at, request.due_at),
    ended_at = CASE WHEN said.due_at IS NULL THEN %s::timestamptz END,
    body = CASE WHEN said.due_at IS NULL THEN ''::bytea ELSE request.body END, answer_at = said.answer_at,
    body_at = CASE WHEN said.due_at IS NULL THEN '' ELSE request.body_at END
FROM unnest({arrays}) AS said ({names})
WHERE request.id = said.id AND request.attempts = said.attempts AND request.state || '' = 'sending'
RETURNING request.id, request.attempts
""".format(arrays=", ".join(f"%s::{kind}[]" for kind in _SAID.values()), names=", ".join(_SAID))
"""Only a retry has a due time. With `|| ''` the planner does not use the index of leased requests, which has an entry
for every lease since the last vacuum."""


def async_attempts_settle(
    *, attempts: Sequence[tuple[LeasedRequest, AttemptResponse]], now: datetime, settings: AsyncSettings
) -> list[Verdict | None]:
    """Records attempts, the plain ones in one statement. Returns the meaning of each, or None if its lease was lost."""
    verdicts = [_verdict(leased, received, now, settings) for leased, received in attempts]
    noted = [
        (leased, verdict, _noted(leased, received, verdict))
        for (leased, received), verdict in zip(attempts, verdicts, strict=True)
    ]
    _store_answers([columns for leased, _, columns in noted if leased.path != RESPONSES_PATH], now, settings)
    held = _settle_plain([each for each in noted if each[0].is_plain], now)
    for leased, verdict, columns in noted:
        if not leased.is_plain and _settle_alone(leased, verdict, columns, now):
            held.add((leased.id, leased.attempts))
    return [verdict if (leased.id, leased.attempts) in held else None for leased, verdict, _ in noted]


def _store_answers(noted: Sequence[dict[str, Any]], now: datetime, settings: AsyncSettings) -> None:
    """Moves long answers to the file store. A stored response takes over its answer instead."""
    answers = [columns["answer"] or b"" for columns in noted]
    for columns, reference in zip(noted, bodies_store(answers, now=now, settings=settings), strict=True):
        columns["answer_at"], columns["answer"] = reference, None if reference else columns["answer"]


def _settle_plain(
    noted: Sequence[tuple[LeasedRequest, Verdict, dict[str, Any]]], now: datetime
) -> set[tuple[str, int]]:
    if not noted:
        return set()
    rows = [
        (leased.id, leased.attempts, verdict.state.value, *columns.values(), verdict.due_at)
        for leased, verdict, columns in sorted(noted, key=lambda each: each[0].id)
    ]
    with connection.cursor() as cursor:
        columns = zip(_SAID.values(), zip(*rows, strict=True), strict=True)
        cursor.execute(_SETTLE, [now, *(array_text(kind, column) for kind, column in columns)])
        return set(cursor.fetchall())


def _settle_alone(leased: LeasedRequest, verdict: Verdict, noted: dict[str, Any], now: datetime) -> bool:
    if verdict.state is AsyncState.QUEUED:
        noted = noted | {"state": verdict.state.value, "leased_until": None, "due_at": verdict.due_at}
        return _leased_rows(leased).update(**noted) > 0
    return async_request_end(_leased_rows(leased), state=verdict.state, now=now, **noted) is not None


def _noted(leased: LeasedRequest, received: AttemptResponse, verdict: Verdict) -> dict[str, Any]:
    return {
        "status": received.status,
        "reason": verdict.reason.replace("\0", "\ufffd"),
        "failures": leased.failures + verdict.counts,
        "answer": received.body if verdict.state in {AsyncState.DONE, AsyncState.FAILED} else None,
        "answer_at": "",
    }


def _verdict(leased: LeasedRequest, received: AttemptResponse, now: datetime, settings: AsyncSettings) -> Verdict:
    return evaluate_attempt(
        received,
        attempts=leased.attempts,
        failures=leased.failures,
        deadline_at=leased.deadline_at,
        now=now,
        settings=settings,
    )


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
