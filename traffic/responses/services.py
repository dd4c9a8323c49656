"""Accepts, stores, cancels and deletes responses. A background response is a near-real-time request and ends with it;
another one is stored once it is complete. It never calls an engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from random import sample
from typing import Any

from django.conf import settings as django_settings
from django.db import transaction

from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.selectors import ingress_addresses_by_region, serving_region
from traffic.async_requests.services.intake import AsyncSubmission, async_request_accept, serving_region_check
from traffic.async_requests.services.requests import RESPONSES_PATH, async_request_cancel
from traffic.keys.planner import is_counted, sender_key_text
from traffic.responses.models import OPEN_RESPONSE_STATES, StoredResponse, new_response_id
from traffic.responses.planner import (
    JsonObject,
    ResponseRequest,
    ResponseState,
    StoreSettings,
    Turn,
    begun_response,
    check_previous,
    engine_body,
    marks_of,
    parse_request,
    previous_not_found,
    response_not_found,
    state_of,
    store_off,
)
from traffic.responses.selectors import chain_of, kept_of_tenant, kept_since, shown_response, stored_response_of
from traffic.routing.planning.tables import IngressAddress
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

PASSED_ON = ("X-Switchyard-Class", "X-Switchyard-Deadline-Ms", "X-Session-Id", "X-Request-Id", "traceparent")
"""Application headers to forward to the cell."""
TRIMMED_AT_ONCE = 500


def store_settings() -> StoreSettings:
    return StoreSettings(kept_s=django_settings.RESPONSES_DAYS * 86_400.0)


@dataclass(frozen=True, slots=True)
class ResponseSubmission:
    """A request as sent. `headers` have lower-case names; `region` is that of its ingress."""

    body: bytes
    headers: Mapping[str, str]
    region: str = ""


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A response whose application waits: the request to forward, the ingresses to try in order, and what to store."""

    response_id: str
    application: Application
    request: ResponseRequest
    turns: int
    ingresses: tuple[IngressAddress, ...]
    body: bytes
    headers: Mapping[str, str]

    def marks(self, *, is_kept: bool) -> JsonObject:
        return marks_of(self.response_id, self.request, is_kept=is_kept)


def response_begin(
    *, application: Application, submission: ResponseSubmission, now: datetime, settings: StoreSettings
) -> PassedOn | JsonObject:
    """Accepts a request. Returns the response's object in the background, or else what to forward. Raises
    ApplicationRefused if it is not accepted."""
    request = parse_request(submission.body, settings)
    if not settings.is_on and (request.is_kept or request.previous):
        raise store_off()
    _check_room(application, request, settings)
    turns = _turns_before(application, request, now, settings)
    body = engine_body(request, turns, settings)
    if request.is_background:
        return _begin_later(application, submission, request, body, len(turns) + 1, now, settings)
    serving_region_check(application, submission.region, request.model)
    return PassedOn(
        response_id=new_response_id(),
        application=application,
        request=request,
        turns=len(turns) + 1,
        ingresses=_region_ingresses(submission.region),
        body=body,
        headers=_cell_headers(application, submission),
    )


def response_keep(*, passed: PassedOn, answer: JsonObject, now: datetime) -> None:
    """Stores a complete response, as shown."""
    _store_response(
        passed.application,
        passed.request,
        turns=passed.turns,
        now=now,
        id=passed.response_id,
        state=state_of(answer).value,
        ended_at=now,
        response=answer,
    )


def response_cancel(
    *, application: Application, response_id: str, now: datetime, settings: StoreSettings
) -> JsonObject:
    """Cancels a background response. Returns its present object. Raises ApplicationRefused if there is none, or it
    cannot be cancelled."""
    stored = _tenant_response(application, response_id, now, settings)
    if not stored.is_background:
        raise ApplicationRefused(400, None, "Cannot cancel a synchronous response.")
    if stored.request_id is not None and stored.state in OPEN_RESPONSE_STATES:
        async_request_cancel(application=application, request_id=stored.request_id, now=now)
        stored = _tenant_response(application, response_id, now, settings)
    return shown_response(stored)


def response_delete(
    *, application: Application, response_id: str, now: datetime, settings: StoreSettings
) -> JsonObject:
    """Deletes a response; an unfinished one is cancelled. Raises ApplicationRefused if there is none."""
    with transaction.atomic():
        stored = _tenant_response(application, response_id, now, settings)
        if stored.request_id is not None and stored.state in OPEN_RESPONSE_STATES:
            async_request_cancel(application=application, request_id=stored.request_id, now=now)
        StoredResponse.objects.filter(id=stored.id).delete()
    return {"id": response_id, "object": "response", "deleted": True}


def responses_trim(*, now: datetime, settings: StoreSettings | None = None) -> int:
    """Deletes expired responses, at most `TRIMMED_AT_ONCE`. Returns their number. Unfinished ones reach their deadline
    long before."""
    chosen = settings or store_settings()
    old = StoredResponse.objects.filter(created_at__lte=kept_since(now, chosen)).exclude(state__in=OPEN_RESPONSE_STATES)
    ids = list(old.order_by("created_at").values_list("id", flat=True)[:TRIMMED_AT_ONCE])
    return StoredResponse.objects.filter(id__in=ids).delete()[0]


def _begin_later(
    application: Application,
    submission: ResponseSubmission,
    request: ResponseRequest,
    body: bytes,
    turns: int,
    now: datetime,
    settings: StoreSettings,
) -> JsonObject:
    """Creates the request and the stored response in one transaction. The same Idempotency-Key returns the same
    response."""
    if "x-switchyard-callback-url" in submission.headers:
        message = "X-Switchyard-Callback-Url is for /v1/async/…: retrieve a response until it has ended"
        raise ApplicationRefused(400, "bad_header", message)
    limit_ms = submission.headers.get("x-switchyard-deadline-ms", str(round(settings.background_limit_s * 1000)))
    handed_in = AsyncSubmission(
        path=RESPONSES_PATH,
        body=body,
        region=submission.region,
        limit_ms=limit_ms,
        idempotency_key=submission.headers.get("idempotency-key"),
    )
    with transaction.atomic():
        accepted, is_new = async_request_accept(
            application=application,
            submission=handed_in,
            now=now,
            settings=AsyncSettings(max_body_bytes=settings.max_body_bytes),
        )
        if not is_new:
            earlier = StoredResponse.objects.filter(request=accepted).select_related("request").first()
            if earlier is None:
                raise ApplicationRefused(
                    409, "idempotency_conflict", "the response of this Idempotency-Key was deleted"
                )
            return shown_response(earlier)
        response_id = new_response_id()
        begun = begun_response(response_id, request, int(now.timestamp()))
        _store_response(
            application,
            request,
            turns=turns,
            now=now,
            id=response_id,
            is_background=True,
            request=accepted,
            state=ResponseState.IN_PROGRESS.value,
            response=begun,
        )
    return begun


def _store_response(
    application: Application, asked: ResponseRequest, *, turns: int, now: datetime, response: JsonObject, **columns: Any
) -> None:
    items = json.dumps(asked.items, separators=(",", ":")).encode()
    whole = json.dumps(response, separators=(",", ":")).encode()
    StoredResponse.objects.create(
        tenant=application.tenant,
        key=application.key,
        model=asked.model,
        previous=asked.previous,
        turns=turns,
        input=items,
        response=whole,
        bytes=len(items) + len(whole),
        created_at=now,
        **columns,
    )


def _turns_before(
    application: Application, request: ResponseRequest, now: datetime, settings: StoreSettings
) -> tuple[Turn, ...]:
    if not request.previous:
        return ()
    last = stored_response_of(application.tenant, request.previous, now, settings)
    if last is None:
        raise previous_not_found(request.previous)
    check_previous(last.id, ResponseState(last.state), last.turns, settings)
    chain = chain_of(last, now, settings)
    if chain is None:
        raise previous_not_found(request.previous)
    return chain


def _check_room(application: Application, request: ResponseRequest, settings: StoreSettings) -> None:
    if not request.is_kept:
        return
    count, size = kept_of_tenant(application.tenant)
    if count >= settings.max_kept_per_tenant or size >= settings.max_kept_bytes_per_tenant:
        message = (
            f"{count} responses of {size} bytes are kept already; at most {settings.max_kept_per_tenant} of "
            f"{settings.max_kept_bytes_per_tenant} bytes are: delete some, or send `store: false`"
        )
        raise ApplicationRefused(429, "too_many_responses_kept", message)


def _region_ingresses(region: str) -> tuple[IngressAddress, ...]:
    """Ingresses of the region that the request came through, in any order."""
    found = ingress_addresses_by_region().get(serving_region(region) or "", [])
    return tuple(sample(found, len(found)))


def _cell_headers(application: Application, submission: ResponseSubmission) -> dict[str, str]:
    """Headers for the cell: the application's key and, if an ingress has counted the request, a proof of that."""
    headers = {name: submission.headers[name.lower()] for name in PASSED_ON if name.lower() in submission.headers}
    if application.key:
        headers["Authorization"] = submission.headers["authorization"]
        proof, secret = submission.headers.get("x-switchyard-counted", ""), django_settings.SECRET_KEY
        if is_counted(application.key, proof, secret):
            headers["X-Switchyard-Counted"] = sender_key_text(application.key, secret)
    return headers


def _tenant_response(
    application: Application, response_id: str, now: datetime, settings: StoreSettings
) -> StoredResponse:
    stored = stored_response_of(application.tenant, response_id, now, settings)
    if stored is None:
        raise response_not_found(response_id)
    return stored
