"""Near-real-time requests as applications see them: `/v1/async/…`, in the forms of OpenAI's API. An ingress passes
these requests on as they are, key included; the caller is identified here, by the same keys."""

import json
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.views.decorators.csrf import csrf_exempt

from audit.middleware import audit_exempt
from kernel import clock
from traffic.api.openai_form import only, openai_error
from traffic.models import AsyncRequest
from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.async_request import AsyncSettings, AsyncState
from traffic.selectors.application import Application, UnknownApplication, application_of
from traffic.selectors.async_request import async_request_of
from traffic.services.async_request import AsyncSubmission, async_request_accept, async_request_cancel

ENDPOINTS = {"chat/completions": "/v1/chat/completions", "completions": "/v1/completions"}
RETRY_AFTER_S = 5
APPLICATIONS = "requests of applications are counted as usage, by key; they change nothing that operators run"


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("POST")
def accept(request: HttpRequest, kind: str) -> HttpResponseBase:
    """POST /v1/async/chat/completions, /v1/async/completions: 202 and where to ask for the outcome."""
    now, settings = clock.now(), AsyncSettings()
    try:
        application = _application(request, now)
        submission = AsyncSubmission(
            path=ENDPOINTS[kind],
            body=_body(request, settings),
            region=request.headers.get("X-Switchyard-Region", ""),
            limit_ms=request.headers.get("X-Switchyard-Deadline-Ms"),
            callback_url=request.headers.get("X-Switchyard-Callback-Url"),
            idempotency_key=request.headers.get("Idempotency-Key"),
        )
        accepted, is_new = async_request_accept(
            application=application, submission=submission, now=now, settings=settings
        )
    except ApplicationRefused as refusal:
        return _refused(refusal)
    shown = async_request_json(accepted, settings)
    if is_new and accepted.callback_secret:
        shown["callback_secret"] = accepted.callback_secret
    return JsonResponse(shown, status=202, headers={"Location": f"/v1/async/{accepted.id}"})


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("GET", "DELETE")
def detail(request: HttpRequest, request_id: str) -> HttpResponseBase:
    """GET: how a request stands. DELETE: cancel it, unless it has ended."""
    now = clock.now()
    try:
        application = _application(request, now)
    except ApplicationRefused as refusal:
        return _refused(refusal)
    if request.method == "DELETE":
        stored = async_request_cancel(application=application, request_id=request_id, now=now)
    else:
        stored = async_request_of(application, request_id)
    if stored is None:
        return _refused(ApplicationRefused(404, "not_found", f"there is no request {request_id[:40]!r}"))
    return JsonResponse(async_request_json(stored, AsyncSettings()))


@csrf_exempt
@audit_exempt(APPLICATIONS)
def unknown_path(request: HttpRequest) -> HttpResponseBase:
    """Every other path below /v1/async/."""
    known = ", ".join(f"/v1/async/{kind}" for kind in ENDPOINTS)
    return _refused(ApplicationRefused(404, "unknown_url", f"Unknown request URL; there are {known} and /v1/async/ID"))


def async_request_json(request: AsyncRequest, settings: AsyncSettings) -> dict[str, Any]:
    """A request as its application sees it; times in seconds since 1970."""
    ended_at = request.ended_at
    return {
        "id": request.id,
        "object": "async.request",
        "idempotency_key": request.idempotency_key or None,
        "status": request.state,
        "endpoint": request.path,
        "model": request.model,
        "created_at": _seconds(request.created_at),
        "deadline_at": _seconds(request.deadline_at),
        "ended_at": _seconds(ended_at),
        "expires_at": _seconds(ended_at + timedelta(seconds=settings.kept_s)) if ended_at else None,
        "attempts": request.attempts,
        "response": _response(request),
        "error": _error(request),
    }


def _response(request: AsyncRequest) -> dict[str, Any] | None:
    if request.answer is None or request.status is None:
        return None
    try:
        body = json.loads(bytes(request.answer))
    except ValueError:
        body = None
    return {"status_code": request.status, "body": body}


def _error(request: AsyncRequest) -> dict[str, Any] | None:
    codes = {AsyncState.FAILED: "failed", AsyncState.EXPIRED: "deadline_exceeded", AsyncState.CANCELLED: "cancelled"}
    code = codes.get(AsyncState(request.state))
    return {"message": request.reason, "type": "server_error", "param": None, "code": code} if code else None


def _application(request: HttpRequest, now: datetime) -> Application:
    try:
        return application_of(request.headers.get("Authorization", ""), now)
    except UnknownApplication as unknown:
        raise ApplicationRefused(401, unknown.code, str(unknown)) from unknown


def _body(request: HttpRequest, settings: AsyncSettings) -> bytes:
    """The body, not read where its length says that it is too long."""
    too_long = ApplicationRefused(413, "request_too_large", f"the body is longer than {settings.max_body_bytes} bytes")
    length = request.headers.get("Content-Length", "")
    if length.isdecimal() and int(length) > settings.max_body_bytes:
        raise too_long
    try:
        return request.body
    except RequestDataTooBig:  # one that came in chunks, without a length
        raise too_long from None


def _refused(refusal: ApplicationRefused) -> JsonResponse:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refusal.is_passing else {}
    return openai_error(refusal.status, refusal.code, str(refusal), refusal.param, headers, kind=refusal.kind)


def _seconds(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())
