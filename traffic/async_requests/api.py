"""Near-real-time requests under `/v1/async/` for applications, in OpenAI's format, and request queues for operators.
Ingresses forward these requests unchanged, so the application is identified here by its key. Decides nothing; services
do."""

import json
from datetime import timedelta
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path, re_path
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.async_requests.models import AsyncRequest, RefusedMessage, RequestQueue
from traffic.async_requests.planner import AsyncSettings, AsyncState
from traffic.async_requests.selectors import async_request_of
from traffic.async_requests.services.queues import request_queue_declare, request_queue_withdraw
from traffic.async_requests.services.requests import AsyncSubmission, async_request_accept, async_request_cancel
from traffic.tenants.api import application_view, unknown_path
from traffic.tenants.planner import ApplicationRefused, unix_seconds
from traffic.tenants.selectors import Application

ENDPOINTS = {"chat/completions": "/v1/chat/completions", "completions": "/v1/completions"}
APPLICATIONS = "applications' requests are counted as usage, by key; they change nothing that operators run"


@application_view("POST", audit_exempt_as=APPLICATIONS)
def accept(request: HttpRequest, application: Application, kind: str) -> HttpResponseBase:
    """POST /v1/async/chat/completions or /v1/async/completions: 202 and the URL of the outcome."""
    now, settings = clock.now(), AsyncSettings()
    submission = AsyncSubmission(
        path=ENDPOINTS[kind],
        body=_body(request, settings),
        region=request.headers.get("X-Switchyard-Region", ""),
        limit_ms=request.headers.get("X-Switchyard-Deadline-Ms"),
        callback_url=request.headers.get("X-Switchyard-Callback-Url"),
        idempotency_key=request.headers.get("Idempotency-Key"),
    )
    accepted, is_new = async_request_accept(application=application, submission=submission, now=now, settings=settings)
    shown = async_request_json(accepted, settings)
    if is_new and accepted.callback_secret:
        shown["callback_secret"] = accepted.callback_secret
    return JsonResponse(shown, status=202, headers={"Location": f"/v1/async/{accepted.id}"})


@application_view("GET", "DELETE", audit_exempt_as=APPLICATIONS)
def detail(request: HttpRequest, application: Application, request_id: str) -> HttpResponseBase:
    """GET: state of a request. DELETE: cancel it, unless it has ended."""
    if request.method == "DELETE":
        stored = async_request_cancel(application=application, request_id=request_id, now=clock.now())
    else:
        stored = async_request_of(application, request_id)
    if stored is None:
        raise ApplicationRefused(404, "not_found", f"there is no request {request_id[:40]!r}")
    return JsonResponse(async_request_json(stored, AsyncSettings()))


no_such_path = unknown_path(
    ", ".join(f"/v1/async/{kind}" for kind in ENDPOINTS) + " and /v1/async/ID", audit_exempt_as=APPLICATIONS
)


def async_request_json(request: AsyncRequest, settings: AsyncSettings) -> dict[str, Any]:
    """Returns a request in the application's format; times are Unix seconds."""
    ended_at = request.ended_at
    return {
        "id": request.id,
        "object": "async.request",
        "idempotency_key": request.idempotency_key or None,
        "status": request.state,
        "endpoint": request.path,
        "model": request.model,
        "created_at": unix_seconds(request.created_at),
        "deadline_at": unix_seconds(request.deadline_at),
        "ended_at": unix_seconds(ended_at),
        "expires_at": unix_seconds(ended_at + timedelta(seconds=settings.kept_s)) if ended_at else None,
        "attempts": request.attempts,
        "response": _answer_json(request),
        "error": _error_json(request),
    }


def _answer_json(request: AsyncRequest) -> dict[str, Any] | None:
    if request.answer is None or request.status is None:
        return None
    try:
        body = json.loads(bytes(request.answer))
    except ValueError:
        body = None
    return {"status_code": request.status, "body": body}


def _error_json(request: AsyncRequest) -> dict[str, Any] | None:
    codes = {AsyncState.FAILED: "failed", AsyncState.EXPIRED: "deadline_exceeded", AsyncState.CANCELLED: "cancelled"}
    code = codes.get(AsyncState(request.state))
    return {"message": request.reason, "type": "server_error", "param": None, "code": code} if code else None


def _body(request: HttpRequest, settings: AsyncSettings) -> bytes:
    """Returns the body, without reading it if its stated length is too large."""
    too_long = ApplicationRefused(413, "request_too_large", f"the body is longer than {settings.max_body_bytes} bytes")
    length = request.headers.get("Content-Length", "")
    if length.isdecimal() and int(length) > settings.max_body_bytes:
        raise too_long
    try:
        return request.body
    except RequestDataTooBig:  # a chunked body, without a stated length
        raise too_long from None


REFUSED_SHOWN = 20


class RefusedMessageSerializer(serializers.ModelSerializer[RefusedMessage]):
    class Meta:
        model = RefusedMessage
        fields = ["message", "reason", "at"]
        examples = {"message": "5fea7756-0ea4-451a-a703-a558b933e274"}


class RequestQueueSerializer(serializers.ModelSerializer[RequestQueue]):
    key = serializers.CharField(source="key.prefix", help_text="Prefix of the key that its messages use.")
    tenant = serializers.CharField(source="key.tenant")
    reason = serializers.CharField(help_text="Why it is not read, or empty.")
    waiting = serializers.IntegerField(allow_null=True, help_text="Approximate number of messages.")
    refused = serializers.SerializerMethodField(help_text="The last messages left for its dead-letter queue.")

    class Meta:
        model = RequestQueue
        fields = [
            "id", "url", "name", "key", "tenant", "actor", "created_at", "state", "reason", "read_at", "waiting",
            "refused",
        ]  # fmt: skip
        examples = {"name": "sw-0123456789ab-requests-orders"}

    @extend_schema_field(RefusedMessageSerializer(many=True))
    def get_refused(self, row: RequestQueue) -> object:
        return RefusedMessageSerializer(list(row.refused.all())[:REFUSED_SHOWN], many=True).data


class DeclareRequestQueueSerializer(StrictSerializer):
    url = serializers.CharField(max_length=200, help_text="Output `Queue` of deploy/aws/requests.yaml.")
    key = serializers.CharField(max_length=40, help_text="Prefix of an application key.")


class RequestQueueViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[RequestQueue]):
    """SQS queues whose messages are near-real-time requests of a key."""

    queryset = RequestQueue.objects.select_related("key").prefetch_related("refused")
    serializer_class = RequestQueueSerializer
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "name", "created_at")
    columns = "ID, NAME, TENANT, KEY, STATE, WAITING, REASON"

    @extend_schema(request=DeclareRequestQueueSerializer)
    def create(self, request: Request) -> Response:
        """Bind a queue to a key, so that senders read it. Returns 409 if it is bound already."""
        body = body_of(request, DeclareRequestQueueSerializer)
        row = request_queue_declare(**body, actor=actor_of(request), now=clock.now())
        return Response(RequestQueueSerializer(row).data)

    def destroy(self, request: Request, id: str) -> Response:
        """Stop reading a queue; its messages stay there. Responds with the deleted row."""
        return self.remove_object(request, request_queue_withdraw, "queue_id")


ROUTES = (("request-queues", RequestQueueViewSet, "request-queue"),)

urlpatterns = [
    *(path(kind, accept, {"kind": kind}, name=f"async-{kind}") for kind in ENDPOINTS),
    path("<str:request_id>", detail, name="async-request"),
    re_path(r"^", no_such_path),
]
