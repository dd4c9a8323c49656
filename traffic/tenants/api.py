"""What applications read of the control plane's own answers under /v1/: errors in OpenAI's form, for every method.

Lists as OpenAI's clients page through them: `after` the last id that they saw, until `has_more` is false.

Grants of tenants over HTTP: hosts for callbacks, and places in S3. Decides nothing; services do.

Over HTTP: which addresses of a tenant are told of its batches. Decides nothing; services do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.api_surface import ErrorForm, error_object
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.tenants.models import GrantUse, TenantGrant, TenantWebhook
from traffic.tenants.planner import ApplicationRefused, BatchEvent
from traffic.tenants.services import (
    NewSecret,
    tenant_grant_create,
    tenant_grant_withdraw,
    tenant_webhook_create,
    tenant_webhook_remove,
    tenant_webhook_rotate,
)

View = Callable[..., HttpResponseBase]


def openai_error(
    status: int,
    code: str | None,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    kind: str | None = None,
) -> JsonResponse:
    """An error response. `kind`: its type, where it is not that of its status."""
    error = error_object(ErrorForm.OPENAI, status, message, code=code, param=param, kind=kind)
    return JsonResponse(error, status=status, headers=dict(headers or {}))


def only(*methods: str) -> Callable[[View], View]:
    """Answer 405 to every method but these, and HEAD where GET is one of them."""

    def decorate(view: View) -> View:
        @wraps(view)
        def answer(request: HttpRequest, *arguments: object, **named: object) -> HttpResponseBase:
            if request.method in methods or (request.method == "HEAD" and "GET" in methods):
                return view(request, *arguments, **named)
            message = f"{request.method} is not allowed on {request.path}; use {' or '.join(methods)}"
            return openai_error(405, "method_not_allowed", message, headers={"Allow": ", ".join(methods)})

        return answer

    return decorate


Row = TypeVar("Row", bound=Any)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """How many, which way by creation, and behind which id."""

    limit: int
    descending: bool
    after: str | None


def list_query(request: HttpRequest, *, usual: int, most: int) -> ListQuery:
    """
    Raises:
        ApplicationRefused: a parameter is not as OpenAI has it.
    """
    limit, order = request.GET.get("limit", str(usual)), request.GET.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise ApplicationRefused(400, "invalid_value", f"`limit` must be a whole number from 1 to {most}", "limit")
    if order not in {"asc", "desc"}:
        raise ApplicationRefused(400, "invalid_value", "`order` must be asc or desc", "order")
    return ListQuery(int(limit), order == "desc", request.GET.get("after") or None)


def list_rows(rows: "QuerySet[Row]", query: ListQuery) -> tuple[list[Row], bool]:
    """The page that a query means, of rows with `created_at` and `id`, and whether there is more.

    Raises:
        ApplicationRefused: `after` names none of them.
    """
    if query.after:
        last = rows.filter(id=query.after[:80]).first()
        if last is None:
            raise ApplicationRefused(400, "invalid_value", "`after` must be the id of one of this list", "after")
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
    target = serializers.CharField(
        help_text="A host, with its port unless that is 443, or a place in S3 with everything below it."
    )
    region = serializers.CharField(help_text="Of a bucket.")

    class Meta:
        model = TenantGrant
        fields = ["id", "tenant", "use", "target", "region", "actor", "created_at"]
        examples = {"use": "read", "target": "s3://acme-batches/in"}


class CreateTenantGrantSerializer(StrictSerializer):
    tenant = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Left out: what comes without a key."
    )
    use = serializers.ChoiceField(choices=USES, help_text=USE)
    target = serializers.CharField(
        max_length=1000, help_text="`app.example.com`, `app.example.com:8443`; `s3://bucket`, `s3://bucket/prefix`."
    )
    region = serializers.CharField(
        max_length=32, allow_blank=True, required=False, default="", help_text="Of the bucket; empty: AWS_REGION."
    )

    class Meta:
        examples = {"tenant": "acme", "use": "read", "target": "s3://acme-batches/in"}

    def validate_use(self, value: str) -> GrantUse:
        return GrantUse(value)


class TenantGrantFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    use = filters.ChoiceFilter(choices=USES)
    target = filters.CharFilter()

    class Meta:
        model = TenantGrant
        fields: list[str] = []


class TenantGrantViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[TenantGrant]):
    """Hosts that callbacks and webhooks of a tenant may go to, and places in S3 that its batches may read and write.
    Without one: none."""

    serializer_class = TenantGrantSerializer
    filterset_class = TenantGrantFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    columns = "ID, TENANT, USE, TARGET, ACTOR, AGE=created_at:age"
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "tenant", "use", "target", "created_at")

    def get_queryset(self) -> QuerySet[TenantGrant]:
        return TenantGrant.objects.all()

    @extend_schema(
        operation_id="tenant_grants_create",
        request=CreateTenantGrantSerializer,
        responses={200: TenantGrantSerializer},
    )
    def create(self, request: Request) -> Response:
        """Let a tenant's callbacks go to a host, or its batches use a place. 409 if they may already."""
        body = CreateTenantGrantSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = tenant_grant_create(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(TenantGrantSerializer(row).data)

    @extend_schema(operation_id="tenant_grants_delete", responses={200: TenantGrantSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Withdraw a grant; what waits to be sent to a host is given up. Responds with what it was."""
        row = self.get_object()
        shown = TenantGrantSerializer(row).data
        tenant_grant_withdraw(grant_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)


class TenantWebhookSerializer(serializers.ModelSerializer[TenantWebhook]):
    tenant = serializers.CharField(help_text="Empty: batches without a key.")
    url = serializers.CharField(source="shown_url", help_text="The host only: the rest may be a secret.")
    events = serializers.ListField(child=serializers.CharField(), help_text="Empty: all.")
    former_until = serializers.DateTimeField(
        allow_null=True, help_text="Until then messages are signed by the former secret, too."
    )

    class Meta:
        model = TenantWebhook
        fields = ["id", "tenant", "url", "events", "former_until", "actor", "created_at"]
        examples = {"events": ["batch.completed", "batch.failed"]}


class TenantWebhookSecretSerializer(TenantWebhookSerializer):
    secret = serializers.CharField(help_text="As `client.webhooks.unwrap` takes it. Nobody can read it again.")

    class Meta(TenantWebhookSerializer.Meta):
        fields = [*TenantWebhookSerializer.Meta.fields, "secret"]


class CreateTenantWebhookSerializer(StrictSerializer):
    tenant = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Left out: batches without a key."
    )
    url = serializers.CharField(max_length=500, help_text="At a host that the tenant has a `callback` grant for.")
    events = serializers.ListField(
        child=serializers.ChoiceField(choices=choices(BatchEvent)),
        max_length=len(BatchEvent),
        required=False,
        help_text="Empty: all.",
    )

    class Meta:
        examples = {"tenant": "acme", "events": ["batch.completed", "batch.failed"]}


class RotateTenantWebhookSerializer(StrictSerializer):
    at_once = serializers.BooleanField(
        default=False, help_text="Whether the former secret counts no longer; else it does for a day."
    )


class TenantWebhookFilter(filters.FilterSet):
    tenant = filters.CharFilter()

    class Meta:
        model = TenantWebhook
        fields: list[str] = []


class TenantWebhookViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[TenantWebhook]):
    """Addresses of tenants that are told when one of their batches ends, by messages as Standard Webhooks have them."""

    serializer_class = TenantWebhookSerializer
    filterset_class = TenantWebhookFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    ordering_fields = ("id", "tenant", "created_at")
    shown_once = frozenset({"create", "rotate"})
    columns = "ID, TENANT, URL, ACTOR, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[TenantWebhook]:
        return TenantWebhook.objects.all()

    @extend_schema(
        operation_id="tenant_webhooks_create",
        request=CreateTenantWebhookSerializer,
        responses={200: TenantWebhookSecretSerializer},
    )
    def create(self, request: Request) -> Response:
        """Tell an address of a tenant's batches. This answer is the only one that shows its secret."""
        body = CreateTenantWebhookSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        return _shown_once(tenant_webhook_create(**body.validated_data, actor=actor_of(request), now=clock.now()))

    @extend_schema(
        operation_id="tenant_webhooks_rotate",
        request=RotateTenantWebhookSerializer,
        responses={200: TenantWebhookSecretSerializer},
    )
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, id: str) -> Response:
        """A new secret, shown here alone. For a day messages are signed by both, unless it is `at_once`."""
        body = RotateTenantWebhookSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = self.get_object()
        new = tenant_webhook_rotate(webhook_id=row.pk, actor=actor_of(request), now=clock.now(), **body.validated_data)
        return _shown_once(new)

    @extend_schema(operation_id="tenant_webhooks_delete", responses={200: TenantWebhookSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Tell an address no more; what waits to be sent there is given up. Responds with what it was."""
        row = self.get_object()
        shown = TenantWebhookSerializer(row).data
        tenant_webhook_remove(webhook_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)


def _shown_once(new: NewSecret) -> Response:
    return Response({**TenantWebhookSerializer(new.webhook).data, "secret": new.text})
