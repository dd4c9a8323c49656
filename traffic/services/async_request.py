"""Accepts, cancels and ends near-real-time requests. What is accepted is in the database before the response is
sent, and each request ends once: an end names the state that it starts from, and only the first one counts."""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as django_settings
from django.db import transaction
from django.db.models import QuerySet

from engine_agent.protocol.request_bodies import BadRequest, check_body
from engine_agent.protocol.request_checks import check_request
from engine_agent.protocol.states import ServingClass
from fleet.planning.webhooks.delivery import RefusedUrl, WebhookSettings, check_url, parse_networks
from fleet.services.webhook_outbox import delivery_create_to
from kernel.decoding import decode_json
from traffic.models import AsyncRequest
from traffic.models.async_request import OPEN_STATES, new_callback_secret
from traffic.planning.application_refusal import QUOTA_USED_UP, ApplicationRefused
from traffic.planning.async_request import AsyncSettings, AsyncState, limit_of
from traffic.selectors.application import Application
from traffic.selectors.async_request import (
    accepted_since,
    async_request_of,
    deployments_of_model,
    open_requests,
    serving_region,
)
from traffic.selectors.tenant_grant import callback_refusal
from traffic.services.response_outcome import RESPONSES_PATH, response_end

MAX_IDEMPOTENCY_LETTERS = 128
MAX_URL_LETTERS = 500
ENDED_EVENT = "async.ended"
"""The event sent to the callback URL of a request."""


@dataclass(frozen=True, slots=True)
class AsyncSubmission:
    """What an application sent. Everything but `path` and `body` comes from headers; None: not given.

    `sent_at`: when it was handed in, where that is not now; a limit that it states counts from then.
    """

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
    """Accept a request. Returns it, and whether it is new: the same idempotency key finds the same request.

    Raises:
        ApplicationRefused: it is not accepted.
    """
    chosen = settings or AsyncSettings()
    payload = _checked_body(submission.body, chosen)
    model = payload["model"]
    columns = {**_checked_headers(application, submission, now, chosen), **_place(application, submission, model)}
    _check_members(submission, payload)
    digest = hashlib.sha256(submission.path.encode() + b"\0" + submission.body).hexdigest()
    if submission.idempotency_key and (earlier := _earlier(application, submission.idempotency_key, digest)):
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
    """Cancel what has not ended. Returns the request as it then is, or None if the tenant has none such."""
    rows = AsyncRequest.objects.filter(id=request_id, tenant=application.tenant, state__in=OPEN_STATES)
    async_request_end(rows, state=AsyncState.CANCELLED, now=now, reason="cancelled by its application")
    return async_request_of(application, request_id)


def async_request_end(
    rows: "QuerySet[AsyncRequest]", *, state: AsyncState, now: datetime, **columns: Any
) -> AsyncRequest | None:
    """End the one request that `rows` selects, by id and the state that it must be in, and notify its
    callback URL, in one transaction. Returns it, or None if it is not in that state any more."""
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
    """Forget outcomes that were kept for their time. Returns how many."""
    kept_s = (settings or AsyncSettings()).kept_s
    return AsyncRequest.objects.filter(ended_at__lt=now - timedelta(seconds=kept_s)).delete()[0]


def canonical_body(payload: dict[str, Any]) -> bytes:
    """The body that is kept and sent: what was checked, written anew, so that no reader on the way finds anything else
    in it. The model comes first and in plain ASCII, where the quickest reader finds it."""
    return json.dumps({"model": payload["model"], **payload}, separators=(",", ":"), allow_nan=False).encode()


def _checked_body(body: bytes, settings: AsyncSettings) -> dict[str, Any]:
    if len(body) > settings.max_body_bytes:
        raise ApplicationRefused(413, "request_too_large", f"the body is longer than {settings.max_body_bytes} bytes")
    try:
        payload = decode_json(body)
    except ValueError as error:
        raise ApplicationRefused(400, "invalid_json", f"the request body is not valid JSON: {error}") from error
    if not isinstance(payload, dict):
        raise ApplicationRefused(400, "invalid_json", "the request body must be a JSON object")
    model = payload.get("model")
    if not isinstance(model, str) or not model:
        raise ApplicationRefused(400, "missing_required_parameter", "the field `model` must name a model", "model")
    if payload.get("stream"):
        raise ApplicationRefused(
            400, "invalid_value", "a near-real-time request cannot stream: leave out `stream`", "stream"
        )
    return payload


def _check_members(submission: AsyncSubmission, payload: dict[str, Any]) -> None:
    """Check what the cell and its engine would: the client is told now, and not by an outcome.

    Raises:
        ApplicationRefused: a member is missing or wrong.
    """
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
        raise ApplicationRefused(400, "bad_header", f"Idempotency-Key must be 1 to {MAX_IDEMPOTENCY_LETTERS} letters")
    since = min(now, submission.sent_at or now) if submission.limit_ms else now
    columns = {"deadline_at": since + timedelta(seconds=limit_s), "idempotency_key": key}
    return columns | (_checked_callback(application.tenant, submission.callback_url) if submission.callback_url else {})


def _checked_callback(tenant: str, url: str) -> dict[str, str]:
    settings = WebhookSettings(allowed=parse_networks(django_settings.WEBHOOK_NETWORKS))
    try:
        if len(url) > MAX_URL_LETTERS:
            raise RefusedUrl(f"must be at most {MAX_URL_LETTERS} letters long")
        check_url(url, settings)
        if why := callback_refusal(tenant, url):
            raise RefusedUrl(why)
    except RefusedUrl as refusal:
        raise ApplicationRefused(400, "bad_header", f"X-Switchyard-Callback-Url: {refusal}") from refusal
    return {"callback_url": url, "callback_secret": new_callback_secret()}


def _place(application: Application, submission: AsyncSubmission, model: str) -> dict[str, str]:
    region = place_check(application, submission.region, model)
    classes = list(ServingClass)
    urgency = max(classes.index(ServingClass.NEAR_REALTIME), classes.index(application.serving_class))
    return {"region_id": region, "serving_class": classes[urgency].value}


def place_check(application: Application, named: str, model: str) -> str:
    """The region that serves a model for an application; `named` is where its request came in.

    Raises:
        ApplicationRefused: none does, or not with this key.
    """
    region = serving_region(named)
    deployments = deployments_of_model(region, model) if region else None
    if region is None or deployments is None:
        raise ApplicationRefused(503, "no_routing_table", "no region serves yet; try again shortly")
    if not deployments:
        raise ApplicationRefused(404, "model_not_found", f"The model `{model[:200]}` does not exist", "model")
    if not application.may_use(deployments):
        raise ApplicationRefused(
            403, "model_not_allowed", f"This API key is not for the model `{model[:200]}`", "model"
        )
    return region


def _check_quotas(application: Application, now: datetime, settings: AsyncSettings) -> None:
    if application.over_quota:
        why = "You exceeded your current quota: the budget of this month is used up"
        raise ApplicationRefused(429, QUOTA_USED_UP, why, kind=QUOTA_USED_UP)
    if open_requests(application.tenant) >= settings.max_open_per_tenant:
        most = settings.max_open_per_tenant
        raise ApplicationRefused(429, "too_many_open", f"{most} requests wait already; try again when some have ended")
    limit = application.requests_per_min
    if limit and accepted_since(application, now, 60.0) >= limit:
        raise ApplicationRefused(
            429, "rate_limit_exceeded", f"Rate limit reached on requests: Limit {limit} per minute"
        )


def _earlier(application: Application, idempotency_key: str, digest: str) -> AsyncRequest | None:
    rows = AsyncRequest.objects.filter(tenant=application.tenant, idempotency_key=idempotency_key)
    earlier = rows.first()
    if earlier is not None and earlier.digest != digest:
        raise _other_request(idempotency_key)
    return earlier


def _other_request(idempotency_key: str) -> ApplicationRefused:
    message = f"the Idempotency-Key {idempotency_key!r} belongs to another request; use a new one"
    return ApplicationRefused(409, "idempotency_conflict", message)
