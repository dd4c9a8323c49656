"""Over HTTP: which places in S3 a tenant's batches may use. Decides nothing; services do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.api import request_examples
from traffic.models import BucketGrant
from traffic.services.bucket_grant import bucket_grant_create, bucket_grant_withdraw


@extend_schema_serializer(examples=[OpenApiExample("bucket grant", request_examples.BUCKET_GRANT, response_only=True)])
class BucketGrantSerializer(serializers.ModelSerializer[BucketGrant]):
    tenant = serializers.CharField(help_text="Empty: batches without a key.")
    uri = serializers.CharField(source="place", help_text="Everything below it, by whole names between slashes.")

    class Meta:
        model = BucketGrant
        fields = ["id", "tenant", "uri", "region", "may_read", "may_write", "actor", "created_at"]


@extend_schema_serializer(examples=[OpenApiExample("a place", request_examples.NEW_BUCKET_GRANT, request_only=True)])
class CreateBucketGrantSerializer(StrictSerializer):
    tenant = serializers.CharField(
        max_length=64, allow_blank=True, required=False, default="", help_text="Left out: batches without a key."
    )
    uri = serializers.CharField(max_length=1000, help_text="`s3://bucket`, `s3://bucket/prefix`.")
    region = serializers.CharField(
        max_length=32, allow_blank=True, required=False, default="", help_text="Of the bucket; empty: AWS_REGION."
    )
    may_read = serializers.BooleanField(required=False, default=True, help_text="As `switchyard.input_uri`.")
    may_write = serializers.BooleanField(required=False, default=False, help_text="As `switchyard.output_uri`.")


class BucketGrantFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    bucket = filters.CharFilter()

    class Meta:
        model = BucketGrant
        fields: list[str] = []


class BucketGrantViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[BucketGrant]):
    """Places in S3 that a tenant's batches may name as `input_uri` and `output_uri`. Without one: none."""

    serializer_class = BucketGrantSerializer
    filterset_class = BucketGrantFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "tenant", "bucket", "created_at")

    def get_queryset(self) -> QuerySet[BucketGrant]:
        return BucketGrant.objects.all()

    @extend_schema(
        operation_id="bucket_grants_create",
        request=CreateBucketGrantSerializer,
        responses={200: BucketGrantSerializer},
    )
    def create(self, request: Request) -> Response:
        """Let a tenant's batches use a place. 409 if there is a grant of it already."""
        body = CreateBucketGrantSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = bucket_grant_create(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(BucketGrantSerializer(row).data)

    @extend_schema(operation_id="bucket_grants_delete", responses={200: BucketGrantSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Take a place from a tenant. Responds with what it was."""
        row = self.get_object()
        shown = BucketGrantSerializer(row).data
        bucket_grant_withdraw(grant_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)
