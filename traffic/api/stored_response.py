"""Kept responses as applications see them: `/v1/responses/…`, in the forms of OpenAI's API. An ingress passes these
requests on as they are, key included; the caller is identified here, by the same keys. None of them waits for an
engine."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.views.decorators.csrf import csrf_exempt

from audit.middleware import audit_exempt
from engine_agent.protocol.api_surface import ErrorForm, error_object
from kernel import clock
from traffic.api.openai_form import only
from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.stored_response import JsonObject, response_not_found, shown_items
from traffic.selectors.application import Application, UnknownApplication, application_of
from traffic.selectors.stored_response import items_of, shown_response, stored_response_of
from traffic.services.stored_response import response_cancel, response_delete, store_settings

RETRY_AFTER_S = 5
PAGE, LONGEST_PAGE = 20, 100
APPLICATIONS = "responses of applications are theirs to keep and delete; they change nothing that operators run"


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("GET", "DELETE")
def detail(request: HttpRequest, response_id: str) -> HttpResponseBase:
    """GET: the response as it stands. DELETE: forget it."""

    def answer(application: Application, now: datetime) -> JsonObject:
        settings = store_settings()
        if request.method == "DELETE":
            return response_delete(application=application, response_id=response_id, now=now, settings=settings)
        if request.GET.get("stream", "false").lower() not in {"", "0", "false"}:
            message = "a kept response cannot be streamed: retrieve it until it has ended"
            raise ApplicationRefused(400, "unsupported_value", message, "stream")
        stored = stored_response_of(application.tenant, response_id, now, settings)
        if stored is None:
            raise response_not_found(response_id)
        return shown_response(stored)

    return _answered(request, answer)


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("POST")
def cancel(request: HttpRequest, response_id: str) -> HttpResponseBase:
    """POST /v1/responses/ID/cancel: of one in the background."""

    def answer(application: Application, now: datetime) -> JsonObject:
        return response_cancel(application=application, response_id=response_id, now=now, settings=store_settings())

    return _answered(request, answer)


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("GET")
def input_items(request: HttpRequest, response_id: str) -> HttpResponseBase:
    """GET /v1/responses/ID/input_items: what went into this response itself, the last one first."""

    def answer(application: Application, now: datetime) -> JsonObject:
        stored = stored_response_of(application.tenant, response_id, now, store_settings())
        if stored is None:
            raise response_not_found(response_id)
        return _page(request, shown_items(stored.id, items_of(stored)))

    return _answered(request, answer)


@csrf_exempt
@audit_exempt(APPLICATIONS)
def unknown_path(request: HttpRequest, rest: str) -> HttpResponseBase:
    """Every other path below /v1/responses/."""
    message = "Unknown request URL; there are /v1/responses/ID, …/cancel and …/input_items"
    return refused(ApplicationRefused(404, "unknown_url", message))


def application_with_key(authorization: str, now: datetime) -> Application:
    """
    Raises:
        ApplicationRefused: there is none, where one is required, or it opens nothing.
    """
    try:
        return application_of(authorization, now)
    except UnknownApplication as unknown:
        raise ApplicationRefused(401, unknown.code, str(unknown)) from unknown


def refusal_json(refusal: ApplicationRefused) -> tuple[list[tuple[str, str]], bytes]:
    """Headers and body of an error in OpenAI's form."""
    error = error_object(
        ErrorForm.OPENAI, refusal.status, str(refusal), code=refusal.code, param=refusal.param, kind=refusal.kind
    )
    headers = [("Retry-After", str(RETRY_AFTER_S))] if refusal.is_passing else []
    return headers, json.dumps(error).encode()


def _answered(request: HttpRequest, answer: Callable[[Application, datetime], JsonObject]) -> HttpResponseBase:
    now = clock.now()
    try:
        return JsonResponse(answer(application_with_key(request.headers.get("Authorization", ""), now), now))
    except ApplicationRefused as refusal:
        return refused(refusal)


def refused(refusal: ApplicationRefused) -> HttpResponse:
    headers, body = refusal_json(refusal)
    return HttpResponse(body, content_type="application/json", status=refusal.status, headers=dict(headers))


def _page(request: HttpRequest, items: list[dict[str, Any]]) -> JsonObject:
    limit, order = request.GET.get("limit", str(PAGE)), request.GET.get("order", "desc")
    if not (limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= LONGEST_PAGE):
        message = f"`limit` must be a whole number from 1 to {LONGEST_PAGE}"
        raise ApplicationRefused(400, "invalid_value", message, "limit")
    if order not in {"asc", "desc"}:
        raise ApplicationRefused(400, "invalid_value", "`order` must be asc or desc", "order")
    ordered = items if order == "asc" else items[::-1]
    if after := request.GET.get("after"):
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise ApplicationRefused(
                400, "invalid_value", "`after` must be the id of an item of this response", "after"
            )
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }
