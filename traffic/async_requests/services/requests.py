"""Accepts, cancels, leases and ends near-real-time requests. A request is in the database before its response is sent,
and ends once: each end names the initial state, and only the first applies. It ends a stored response in the same
transaction. Each step of a lease is one statement or transaction; if a sender dies between two, another continues after
the lease. It never calls an ingress."""

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as django_settings
from django.db import connection, transaction
from django.db.models import Q, QuerySet

from engine_agent.protocol.request_bodies import BadRequest, check_body
from engine_agent.protocol.request_checks import check_request
from engine_agent.protocol.states import ServingClass
from fleet.webhooks.services import delivery_create_to
from kernel.outbound import RefusedUrl, check_url, parse_networks
from traffic.async_requests.models import OPEN_STATES, AsyncRequest, new_callback_secret
from traffic.async_requests.planner import (
    AsyncSettings,
    AsyncState,
    AttemptResponse,
    Verdict,
    evaluate_attempt,
    limit_of,
)
from traffic.async_requests.selectors import (
    accepted_since,
    async_request_of,
    deployments_of_model,
    open_requests,
    serving_region,
)
from traffic.responses.models import OPEN_RESPONSE_STATES, StoredResponse
from traffic.responses.planner import ResponseState, ended_response, state_of
from traffic.tenants.planner import QUOTA_USED_UP, ApplicationRefused, json_object
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


MAX_IDEMPOTENCY_LETTERS = 128
MAX_URL_LETTERS = 500
ENDED_EVENT = "async.ended"
"""Event sent to the callback URL of a request."""


@dataclass(frozen=True, slots=True)
class AsyncSubmission:
    """A request as sent. All but `path` and `body` comes from headers; None means unstated. `sent_at` is when it was
    sent, if not now; a stated limit counts from then."""

    path: str
    body: bytes
    region: str = ""
    limit_ms: str | None = None
    callback_url: str | None = None
    idempotency_key: str | None = None
    sent_at: datetime | None = None


def async_request_accept(
    *, application: Application, submission: AsyncSubmission, now: datetime, settings: AsyncSettings | None = None
) -> tuple[AsyncRequest, bool]:
    """Accepts a request. Returns it and whether it is new: a repeated idempotency key returns the first request. Raises
    ApplicationRefused if it is not accepted."""
    chosen = settings or AsyncSettings()
    payload = _checked_body(submission.body, chosen)
    model = payload["model"]
    columns = {
        **_checked_headers(application, submission, now, chosen),
        **_placement_columns(application, submission, model),
    }
    _check_members(submission, payload)
    digest = hashlib.sha256(submission.path.encode() + b"\0" + submission.body).hexdigest()
    if submission.idempotency_key and (earlier := _repeated_request(application, submission.idempotency_key, digest)):
        return earlier, False
    _check_quotas(application, now, chosen)
    columns |= {
        "tenant": application.tenant,
        "path": submission.path,
        "model": model,
        "body": canonical_body(payload),
        "digest": digest,
    }
    columns |= {"key": application.key, "max_concurrent": application.max_concurrent, "created_at": now, "due_at": now}
    if not submission.idempotency_key:
        return AsyncRequest.objects.create(**columns), True
    unique = {"tenant": columns.pop("tenant"), "idempotency_key": columns.pop("idempotency_key")}
    request, created = AsyncRequest.objects.get_or_create(**unique, defaults=columns)
    if not created and request.digest != digest:
        raise _other_request(submission.idempotency_key)
    return request, created


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
    """Deletes outcomes after their retention. Returns their number."""
    kept_s = (settings or AsyncSettings()).kept_s
    return AsyncRequest.objects.filter(ended_at__lt=now - timedelta(seconds=kept_s)).delete()[0]


def canonical_body(payload: dict[str, Any]) -> bytes:
    """Returns the validated body, serialised again so that all readers on the way parse it alike. The model comes first
    and in ASCII, for the parser that stops there."""
    return json.dumps({"model": payload["model"], **payload}, separators=(",", ":"), allow_nan=False).encode()


def _checked_body(body: bytes, settings: AsyncSettings) -> dict[str, Any]:
    if len(body) > settings.max_body_bytes:
        raise ApplicationRefused(413, "request_too_large", f"the body is longer than {settings.max_body_bytes} bytes")
    payload = json_object(body)
    model = payload.get("model")
    if not isinstance(model, str) or not model:
        raise ApplicationRefused(400, "missing_required_parameter", "the field `model` must name a model", "model")
    if payload.get("stream"):
        raise ApplicationRefused(
            400, "invalid_value", "a near-real-time request cannot stream; omit `stream`", "stream"
        )
    return payload


def _check_members(submission: AsyncSubmission, payload: dict[str, Any]) -> None:
    try:
        check_request(submission.path, payload)
        check_body(submission.path, submission.body)
    except BadRequest as error:
        code = error.code or "invalid_value"
        raise ApplicationRefused(error.status, code, str(error), error.param) from error


def _checked_headers(
    application: Application, submission: AsyncSubmission, now: datetime, settings: AsyncSettings
) -> dict[str, Any]:
    try:
        limit_s = limit_of(submission.limit_ms, settings)
    except ValueError as error:
        raise ApplicationRefused(400, "bad_header", f"X-Switchyard-Deadline-Ms {error}") from error
    key = submission.idempotency_key or ""
    if len(key) > MAX_IDEMPOTENCY_LETTERS or not key.isprintable():
        raise ApplicationRefused(
            400, "bad_header", f"Idempotency-Key must be 1 to {MAX_IDEMPOTENCY_LETTERS} characters"
        )
    since = min(now, submission.sent_at or now) if submission.limit_ms else now
    columns = {"deadline_at": since + timedelta(seconds=limit_s), "idempotency_key": key}
    return columns | (_checked_callback(application.tenant, submission.callback_url) if submission.callback_url else {})


def _checked_callback(tenant: str, url: str) -> dict[str, str]:
    try:
        if len(url) > MAX_URL_LETTERS:
            raise RefusedUrl(f"must be at most {MAX_URL_LETTERS} characters long")
        check_url(url, parse_networks(django_settings.WEBHOOK_NETWORKS))
        if why := callback_refusal(tenant, url):
            raise RefusedUrl(why)
    except RefusedUrl as refusal:
        raise ApplicationRefused(400, "bad_header", f"X-Switchyard-Callback-Url: {refusal}") from refusal
    return {"callback_url": url, "callback_secret": new_callback_secret()}


def _placement_columns(application: Application, submission: AsyncSubmission, model: str) -> dict[str, str]:
    region = serving_region_check(application, submission.region, model)
    classes = list(ServingClass)
    urgency = max(classes.index(ServingClass.NEAR_REALTIME), classes.index(application.serving_class))
    return {"region_id": region, "serving_class": classes[urgency].value}


def serving_region_check(application: Application, named: str, model: str) -> str:
    """Returns the region that serves a model for an application; `named` is the region of its ingress. Raises
    ApplicationRefused if no region serves it, or the key is not valid for it."""
    region = serving_region(named)
    deployments = deployments_of_model(region, model) if region else None
    if region is None or deployments is None:
        raise ApplicationRefused(503, "no_routing_table", "no region serves yet; retry shortly")
    if not deployments:
        raise ApplicationRefused(404, "model_not_found", f"The model `{model[:200]}` does not exist", "model")
    if not application.may_use(deployments):
        raise ApplicationRefused(
            403, "model_not_allowed", f"This API key does not include the model `{model[:200]}`", "model"
        )
    return region


def _check_quotas(application: Application, now: datetime, settings: AsyncSettings) -> None:
    if application.over_quota:
        why = "You exceeded your current quota: the budget of this month is used up"
        raise ApplicationRefused(429, QUOTA_USED_UP, why, kind=QUOTA_USED_UP)
    if open_requests(application.tenant) >= settings.max_open_per_tenant:
        most = settings.max_open_per_tenant
        raise ApplicationRefused(429, "too_many_open", f"{most} requests wait already; retry after some have ended")
    limit = application.requests_per_min
    if limit and accepted_since(application, now, 60.0) >= limit:
        raise ApplicationRefused(
            429, "rate_limit_exceeded", f"Rate limit reached on requests: Limit {limit} per minute"
        )


def _repeated_request(application: Application, idempotency_key: str, digest: str) -> AsyncRequest | None:
    rows = AsyncRequest.objects.filter(tenant=application.tenant, idempotency_key=idempotency_key)
    earlier = rows.first()
    if earlier is not None and earlier.digest != digest:
        raise _other_request(idempotency_key)
    return earlier


def _other_request(idempotency_key: str) -> ApplicationRefused:
    message = f"the Idempotency-Key {idempotency_key!r} belongs to another request; use a new one"
    return ApplicationRefused(409, "idempotency_conflict", message)


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
