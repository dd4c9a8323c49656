"""Over HTTP: which addresses of a tenant are told of its batches. Decides nothing; services do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.planning.states import choices
from kernel import clock
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.models import TenantWebhook
from traffic.planning.batch_event import BatchEvent
from traffic.services.tenant_webhook import (
    NewSecret,
    tenant_webhook_create,
    tenant_webhook_remove,
    tenant_webhook_rotate,
)


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
