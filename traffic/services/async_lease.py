"""Leases near-real-time requests to senders and records their outcomes. Each step is one statement or one transaction,
so a sender may die between any two; another one claims its requests when the leases expire."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet

from traffic.models import AsyncRequest
from traffic.planning.async_request import AsyncSettings, AsyncState, AttemptResponse, Verdict, judge
from traffic.services.async_request import async_request_end

MAX_AT_ONCE = 100
"""Requests that are expired in one pass."""
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
"""Tenants take turns, so that one who sends much waits behind itself only."""


@dataclass(frozen=True, slots=True)
class LeasedRequest:
    """A request that is ours to send until its lease ends. `attempts` is the number of this attempt, and its fence."""

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
        """What may have too much to do: a model in a region."""
        return f"{self.region} {self.model}"


def async_requests_claim(
    *, count: int, full: Collection[str], now: datetime, settings: AsyncSettings
) -> list[LeasedRequest]:
    """Lease at most `count` requests that are due, or whose sender is gone, to none of the `full` targets."""
    arguments: dict[str, Any] = {
        "now": now,
        "until": now + timedelta(seconds=settings.lease_s),
        "per_tenant": settings.max_sending_per_tenant,
        "full": list(full),
        "count": count,
    }
    with connection.cursor() as cursor:
        cursor.execute(_CLAIM, arguments)
        return [_leased(*columns) for columns in cursor.fetchall()]


def _leased(*columns: Any) -> LeasedRequest:
    id, tenant, key, region, path, model, serving_class, body, *rest = columns
    return LeasedRequest(id, tenant, key, region, path, model, serving_class, bytes(body), *rest)


def async_leases_renew(
    *, leased: Iterable[LeasedRequest], now: datetime, settings: AsyncSettings
) -> set[LeasedRequest]:
    """Renew the leases that are still ours. Returns those; the others ended or were claimed by another sender."""
    until = now + timedelta(seconds=settings.lease_s)
    return {each for each in leased if _ours(each).update(leased_until=until)}


def async_lease_release(*, leased: LeasedRequest, now: datetime) -> bool:
    """Give back what was not finished, so that another sender may take it at once."""
    return _ours(leased).update(state=AsyncState.QUEUED.value, leased_until=None, due_at=now) > 0


def async_attempt_settle(
    *, leased: LeasedRequest, received: AttemptResponse, now: datetime, settings: AsyncSettings
) -> Verdict | None:
    """Note what an attempt brought. Returns what it means, or None if the request was not ours any more."""
    verdict = judge(
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
        return verdict if _ours(leased).update(**noted) else None
    if verdict.state in {AsyncState.DONE, AsyncState.FAILED}:
        noted["answer"] = received.body
    ended = async_request_end(_ours(leased), state=verdict.state, now=now, **noted)
    return verdict if ended is not None else None


def async_requests_open() -> bool:
    """Whether there is any request that has not ended: one look into an index."""
    return AsyncRequest.objects.filter(ended_at=None).exists()


def async_requests_expire(*, now: datetime) -> int:
    """End what no sender holds and whose deadline has passed. Returns how many, at most `MAX_AT_ONCE`."""
    unleased = Q(state=AsyncState.QUEUED.value) | Q(state=AsyncState.SENDING.value, leased_until__lte=now)
    late = AsyncRequest.objects.filter(unleased, ended_at=None, deadline_at__lte=now)
    ids = list(late.order_by("deadline_at").values_list("id", flat=True)[:MAX_AT_ONCE])
    reason = "the deadline passed before it could be answered"
    ended = [async_request_end(late.filter(id=each), state=AsyncState.EXPIRED, now=now, reason=reason) for each in ids]
    return sum(request is not None for request in ended)


def _ours(leased: LeasedRequest) -> "QuerySet[AsyncRequest]":
    return AsyncRequest.objects.filter(id=leased.id, state=AsyncState.SENDING.value, attempts=leased.attempts)
