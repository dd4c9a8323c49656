"""What tenants and their keys used, by the hour, over HTTP. Read only."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema_serializer
from rest_framework import serializers

from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.api import key_examples as examples
from traffic.models import UsageHour


@extend_schema_serializer(examples=[OpenApiExample("usage", examples.USAGE, response_only=True)])
class UsageSerializer(serializers.ModelSerializer[UsageHour]):
    key = serializers.CharField(help_text="Prefix of a key; empty: the tenant's requests and tokens, as cells count.")
    hour = serializers.DateTimeField(help_text="When it began.")

    class Meta:
        model = UsageHour
        fields = [
            "tenant", "key", "hour", "requests", "limited", "errors", "prompt_tokens", "completion_tokens",
        ]  # fmt: skip


class UsageFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    key = filters.CharFilter()
    since = filters.IsoDateTimeFilter(field_name="hour", lookup_expr="gte")
    until = filters.IsoDateTimeFilter(field_name="hour", lookup_expr="lt")

    class Meta:
        model = UsageHour
        fields: list[str] = []


class UsageViewSet(ListModelMixin, GenericViewSet[UsageHour]):
    """Requests, refusals, errors and tokens by the hour, newest first. Rows with a key count what ingresses saw, rows
    without one what cells served the tenant: the two overlap, so add up either."""

    serializer_class = UsageSerializer
    filterset_class = UsageFilter
    page_order = "-id"
    ordering_fields = ("id", "hour", "tenant", "key", "requests", "prompt_tokens", "completion_tokens")

    def get_queryset(self) -> QuerySet[UsageHour]:
        return UsageHour.objects.all()
