"""Grants of tenants over HTTP: hosts for callbacks, and places in S3. Decides nothing; services do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.models import TenantGrant
from traffic.models.tenant_access import GrantUse
from traffic.services.tenant_grant import tenant_grant_create, tenant_grant_withdraw

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
