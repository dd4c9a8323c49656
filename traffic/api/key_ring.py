"""Which version of the application keys each ingress enforces, over HTTP. Read only."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema_serializer
from rest_framework import serializers

from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.api import key_examples as examples
from traffic.models import Ingress
from traffic.selectors.key import ingresses_with_keys


@extend_schema_serializer(examples=[OpenApiExample("key ring", examples.RING, response_only=True)])
class KeyRingSerializer(serializers.ModelSerializer[Ingress]):
    ingress = serializers.CharField(source="id")
    region = serializers.CharField(source="region_id")
    connected = serializers.BooleanField()
    version = serializers.IntegerField(help_text="Of the keys that it enforces; 0: from before the first key.")
    wanted_version = serializers.IntegerField(help_text="Of the keys in its region's newest table.")

    class Meta:
        model = Ingress
        fields = ["ingress", "region", "connected", "version", "wanted_version"]


class KeyRingFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")

    class Meta:
        model = Ingress
        fields: list[str] = []


class KeyRingViewSet(ReadOnlyModelViewSet[Ingress]):
    """The keys as each ingress has them: an ingress enforces what it acknowledged, connected or not."""

    serializer_class = KeyRingSerializer
    filterset_class = KeyRingFilter
    lookup_field = "id"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("id", "region")
    watch_kind = "key-ring"
    measured = frozenset({"connected", "version", "wanted_version"})

    def get_queryset(self) -> QuerySet[Ingress]:
        return ingresses_with_keys()
