"""Batches as applications see them: `/v1/batches…`, in the forms of OpenAI's API."""

from collections.abc import Callable

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.views.decorators.csrf import csrf_exempt

from audit.middleware import audit_exempt
from kernel import clock
from kernel.decoding import decode_json
from traffic.api.openai_form import only
from traffic.api.openai_list import list_json, list_query, list_rows
from traffic.api.stored_response import application_with_key, refused
from traffic.models import Batch
from traffic.planning.application_refusal import ApplicationRefused
from traffic.planning.batch import batch_not_found, checked_batch
from traffic.selectors.application import Application
from traffic.selectors.batch import batch_json, batch_of, batches_of, tallies
from traffic.services.batch import batch_cancel, batch_create, batch_settings

APPLICATIONS = "batches of applications are counted as usage, by key; they change nothing that operators run"


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("GET", "POST")
def batches(request: HttpRequest) -> HttpResponseBase:
    """GET: the tenant's batches. POST: begin one."""

    def answer(application: Application) -> HttpResponseBase:
        now = clock.now()
        if request.method == "POST":
            created = batch_create(
                application=application,
                asked=checked_batch(_payload(request)),
                region=request.headers.get("X-Switchyard-Region", ""),
                now=now,
                settings=batch_settings(),
            )
            return _shown(created)
        rows, has_more = list_rows(batches_of(application.tenant), list_query(request, usual=20, most=100))
        done = tallies(rows)
        shown = list_json(rows, lambda row: batch_json(row, done[row.id], now=now), has_more=has_more)
        return JsonResponse(shown)

    return _answered(request, answer)


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("GET")
def detail(request: HttpRequest, batch_id: str) -> HttpResponseBase:
    """How a batch stands."""

    def answer(application: Application) -> HttpResponseBase:
        batch = batch_of(application.tenant, batch_id)
        if batch is None:
            raise batch_not_found(batch_id)
        return _shown(batch)

    return _answered(request, answer)


@csrf_exempt
@audit_exempt(APPLICATIONS)
@only("POST")
def cancel(request: HttpRequest, batch_id: str) -> HttpResponseBase:
    """POST /v1/batches/ID/cancel."""
    return _answered(
        request,
        lambda application: _shown(batch_cancel(application=application, batch_id=batch_id, now=clock.now())),
    )


@csrf_exempt
@audit_exempt(APPLICATIONS)
def unknown_path(request: HttpRequest, rest: str) -> HttpResponseBase:
    """Every other path below /v1/batches."""
    message = "Unknown request URL; there are /v1/batches, /v1/batches/ID and /v1/batches/ID/cancel"
    return refused(ApplicationRefused(404, "unknown_url", message))


def _shown(batch: Batch) -> HttpResponseBase:
    return JsonResponse(batch_json(batch, tallies([batch])[batch.id], now=clock.now()))


def _payload(request: HttpRequest) -> object:
    try:
        return decode_json(request.body)
    except RequestDataTooBig:
        raise ApplicationRefused(413, "request_too_large", "the request body is too long") from None
    except ValueError as error:
        raise ApplicationRefused(400, "invalid_json", f"the request body is not valid JSON: {error}") from error


def _answered(request: HttpRequest, answer: Callable[[Application], HttpResponseBase]) -> HttpResponseBase:
    try:
        return answer(application_with_key(request.headers.get("Authorization", ""), clock.now()))
    except ApplicationRefused as refusal:
        return refused(refusal)
