"""Grants and batch webhooks of tenants over HTTP, and what all endpoints under /v1/ share: identification of the
application, errors in OpenAI's format, and lists with OpenAI's pagination (`after`, `has_more`). Decides nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from audit.middleware import audit_exempt
from engine_agent.protocol.api_surface import ErrorForm, error_object
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.tenants.models import GrantUse, TenantGrant, TenantWebhook
from traffic.tenants.planner import ApplicationRefused, BatchEvent
from traffic.tenants.selectors import application_of
from traffic.tenants.services import (
    NewSecret,
    tenant_grant_create,
    tenant_grant_withdraw,
    tenant_webhook_create,
    tenant_webhook_remove,
    tenant_webhook_rotate,
)

View = Callable[..., HttpResponseBase]
RETRY_AFTER_S = 5
APPLICATION = "switchyard.application"
"""Scope entry with the application of the request's key, identified before its body was read
(controlplane.request_bodies)."""


def openai_error(
    status: int,
    code: str | None,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    kind: str | None = None,
) -> JsonResponse:
    """Returns an error response. `kind` is its type, if it differs from the status's."""
    error = error_object(ErrorForm.OPENAI, status, message, code=code, param=param, kind=kind)
    return JsonResponse(error, status=status, headers=dict(headers or {}))


def only(*methods: str) -> Callable[[View], View]:
    """Responds with 405 to all methods but these, and HEAD where GET is allowed."""

    def decorate(view: View) -> View:
        @wraps(view)
        def answer(request: HttpRequest, *arguments: object, **named: object) -> HttpResponseBase:
            if request.method in methods or (request.method == "HEAD" and "GET" in methods):
                return view(request, *arguments, **named)
            message = f"{request.method} is not allowed on {request.path}; use {' or '.join(methods)}"
            return openai_error(405, "method_not_allowed", message, headers={"Allow": ", ".join(methods)})

        return answer

    return decorate


def application_view(*methods: str, audit_exempt_as: str) -> Callable[[View], View]:
    """Makes `view(request, application, …)` the view of a path under /v1/. It gets the application of the request's
    key, and its `ApplicationRefused` is answered in OpenAI's format. `audit_exempt_as`: why no change is audited."""

    def decorate(view: View) -> View:
        @csrf_exempt
        @audit_exempt(audit_exempt_as)
        @only(*methods)
        @wraps(view)
        def answer(request: HttpRequest, **named: object) -> HttpResponseBase:
            try:
                application = application_of(request.headers.get("Authorization", ""), clock.now())
                return view(request, application, **named)
            except ApplicationRefused as refusal:
                return refused(refusal)

        return answer

    return decorate


def unknown_path(known: str, *, audit_exempt_as: str) -> View:
    """Returns a view that responds with 404 and the `known` paths."""

    @csrf_exempt
    @audit_exempt(audit_exempt_as)
    def answer(request: HttpRequest, **_: object) -> HttpResponseBase:
        return refused(ApplicationRefused(404, "unknown_url", f"Unknown request URL; known: {known}"))

    return answer


def refused(refusal: ApplicationRefused) -> HttpResponse:
    headers, body = refusal_json(refusal)
    return HttpResponse(body, content_type="application/json", status=refusal.status, headers=dict(headers))


def refusal_json(refusal: ApplicationRefused) -> tuple[list[tuple[str, str]], bytes]:
    """Returns headers and body of an error in OpenAI's format."""
    error = error_object(
        ErrorForm.OPENAI, refusal.status, str(refusal), code=refusal.code, param=refusal.param, kind=refusal.kind
    )
    headers = [("Retry-After", str(RETRY_AFTER_S))] if refusal.is_passing else []
    return headers, json.dumps(error).encode()


Row = TypeVar("Row", bound=Any)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Page size, order by creation, and the ID after which the page starts."""

    limit: int
    descending: bool
    after: str | None


def list_query(request: HttpRequest, *, usual: int, most: int) -> ListQuery:
    """Raises ApplicationRefused if a parameter is invalid in OpenAI's API."""
    limit, order = request.GET.get("limit", str(usual)), request.GET.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise ApplicationRefused(400, "invalid_value", f"`limit` must be a whole number from 1 to {most}", "limit")
    if order not in {"asc", "desc"}:
        raise ApplicationRefused(400, "invalid_value", "`order` must be asc or desc", "order")
    return ListQuery(int(limit), order == "desc", request.GET.get("after") or None)


def list_rows(rows: "QuerySet[Row]", query: ListQuery) -> tuple[list[Row], bool]:
    """Returns the requested page of rows with `created_at` and `id`, and whether there are more. Raises
    ApplicationRefused if `after` is not in the list."""
    if query.after:
        last = rows.filter(id=query.after[:80]).first()
        if last is None:
            raise ApplicationRefused(400, "invalid_value", "`after` must be an ID in this list", "after")
        way = "lt" if query.descending else "gt"
        same_time = Q(created_at=last.created_at, **{f"id__{way}": last.id})
        rows = rows.filter(Q(**{f"created_at__{way}": last.created_at}) | same_time)
    ordered = rows.order_by("-created_at", "-id") if query.descending else rows.order_by("created_at", "id")
    found = list(ordered[: query.limit + 1])
    return found[: query.limit], len(found) > query.limit


def list_json(rows: Sequence[Row], shown: Callable[[Row], dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [shown(row) for row in rows],
        "first_id": rows[0].id if rows else None,
        "last_id": rows[-1].id if rows else None,
        "has_more": has_more,
    }


USES = [(use.value, use.value) for use in GrantUse]
USE = (
    "`callback`: callbacks and webhooks of the tenant may go to a host; `read`: its batches may name objects there as "
    "`switchyard.input_uri`; `write`: as `switchyard.output_uri`."
)


class TenantGrantSerializer(serializers.ModelSerializer[TenantGrant]):
    tenant = serializers.CharField(help_text="Empty for requests and batches without a key.")
    use = serializers.ChoiceField(choices=USES, help_text=USE)
    target = serializers.CharField(help_text="A host, with its port unless 443, or an S3 prefix.")
    region = serializers.CharField(help_text="Region of a bucket.")

    class Meta:
        model = TenantGrant
        fields = ["id", "tenant", "use", "target", "region", "actor", "created_at"]
        examples = {"use": "read", "target": "s3://acme-batches/in"}


class CreateTenantGrantSerializer(StrictSerializer):
    tenant = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Default: requests without a key."
    )
    use = serializers.ChoiceField(choices=USES, help_text=USE)
    target = serializers.CharField(
        max_length=1000, help_text="`app.example.com`, `app.example.com:8443`; `s3://bucket`, `s3://bucket/prefix`."
    )
    region = serializers.CharField(
        max_length=32,
        allow_blank=True,
        required=False,
        default="",
        help_text="Region of the bucket; default: AWS_REGION.",
    )

    class Meta:
        examples = {"tenant": "acme", "use": "read", "target": "s3://acme-batches/in"}

    def validate_use(self, value: str) -> GrantUse:
        return GrantUse(value)


class TenantGrantFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    use = filters.ChoiceFilter(choices=USES)
    target = filters.CharFilter()


class TenantGrantViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[TenantGrant]):
    """Hosts that a tenant's callbacks and webhooks may call, and S3 prefixes that its batches may read and write. None
    by default."""

    queryset = TenantGrant.objects.all()
    serializer_class = TenantGrantSerializer
    filterset_class = TenantGrantFilter
    columns = "ID, TENANT, USE, TARGET, ACTOR, AGE=created_at:age"
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "tenant", "use", "target", "created_at")

    @extend_schema(request=CreateTenantGrantSerializer)
    def create(self, request: Request) -> Response:
        """Grant a tenant a callback host or an S3 prefix. Returns 409 if it is granted already."""
        body = body_of(request, CreateTenantGrantSerializer)
        row = tenant_grant_create(**body, actor=actor_of(request), now=clock.now())
        return Response(TenantGrantSerializer(row).data)

    def destroy(self, request: Request, id: str) -> Response:
        """Withdraw a grant and cancel pending messages to its host. Responds with the deleted grant."""
        return self.remove_object(request, tenant_grant_withdraw, "grant_id")


class TenantWebhookSerializer(serializers.ModelSerializer[TenantWebhook]):
    tenant = serializers.CharField(help_text="Empty for batches without a key.")
    url = serializers.CharField(source="shown_url", help_text="Host only, because the rest may be secret.")
    events = serializers.ListField(child=serializers.CharField(), help_text="Empty for all.")
    former_until = serializers.DateTimeField(
        allow_null=True, help_text="Until then messages are also signed with the former secret."
    )

    class Meta:
        model = TenantWebhook
        fields = ["id", "tenant", "url", "events", "former_until", "actor", "created_at"]
        examples = {"events": ["batch.completed", "batch.failed"]}


class TenantWebhookSecretSerializer(TenantWebhookSerializer):
    secret = serializers.CharField(help_text="For `client.webhooks.unwrap`. It cannot be read again.")

    class Meta(TenantWebhookSerializer.Meta):
        fields = [*TenantWebhookSerializer.Meta.fields, "secret"]


class CreateTenantWebhookSerializer(StrictSerializer):
    tenant = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Default: batches without a key."
    )
    url = serializers.CharField(max_length=500, help_text="Its host needs a `callback` grant of the tenant.")
    events = serializers.ListField(
        child=serializers.ChoiceField(choices=choices(BatchEvent)),
        max_length=len(BatchEvent),
        required=False,
        help_text="Empty for all.",
    )

    class Meta:
        examples = {"tenant": "acme", "events": ["batch.completed", "batch.failed"]}


class RotateTenantWebhookSerializer(StrictSerializer):
    at_once = serializers.BooleanField(
        default=False, help_text="Whether the former secret stops signing immediately instead of after a day."
    )


class TenantWebhookFilter(filters.FilterSet):
    tenant = filters.CharFilter()


class TenantWebhookViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[TenantWebhook]):
    """Webhooks of tenants that receive a message when a batch ends (Standard Webhooks)."""

    queryset = TenantWebhook.objects.all()
    serializer_class = TenantWebhookSerializer
    filterset_class = TenantWebhookFilter
    page_order = "id"
    ordering_fields = ("id", "tenant", "created_at")
    shown_once = frozenset({"create", "rotate"})
    columns = "ID, TENANT, URL, ACTOR, AGE=created_at:age"

    @extend_schema(request=CreateTenantWebhookSerializer, responses={200: TenantWebhookSecretSerializer})
    def create(self, request: Request) -> Response:
        """Create a webhook. Only this response shows its secret."""
        body = body_of(request, CreateTenantWebhookSerializer)
        return _shown_once(tenant_webhook_create(**body, actor=actor_of(request), now=clock.now()))

    @extend_schema(request=RotateTenantWebhookSerializer, responses={200: TenantWebhookSecretSerializer})
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, id: str) -> Response:
        """Replace the secret; only this response shows it. Messages are signed with both for a day, unless
        `at_once`."""
        body = body_of(request, RotateTenantWebhookSerializer)
        row = self.get_object()
        new = tenant_webhook_rotate(webhook_id=row.pk, actor=actor_of(request), now=clock.now(), **body)
        return _shown_once(new)

    def destroy(self, request: Request, id: str) -> Response:
        """Delete a webhook and cancel its pending messages. Responds with the deleted webhook."""
        return self.remove_object(request, tenant_webhook_remove, "webhook_id")


def _shown_once(new: NewSecret) -> Response:
    return Response({**TenantWebhookSerializer(new.webhook).data, "secret": new.text})


ROUTES = (
    ("tenant-grants", TenantGrantViewSet, "tenant-grant"),
    ("tenant-webhooks", TenantWebhookViewSet, "tenant-webhook"),
)
