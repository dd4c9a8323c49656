"""Ingresses over HTTP: what they run and how they see the cells. Read only."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.api import examples
from traffic.models import Ingress
from traffic.selectors.ingress import ingresses_described


@extend_schema_serializer(examples=[OpenApiExample("ingress", examples.INGRESS, response_only=True)])
class IngressSerializer(serializers.ModelSerializer[Ingress]):
    region = serializers.CharField(source="region_id")
    connected = serializers.BooleanField()
    last_seen_at = serializers.DateTimeField(source="report.last_seen_at", default=None, allow_null=True)
    revision = serializers.IntegerField(help_text="Of the routing table in force; 0: none yet.")
    wanted_revision = serializers.IntegerField(help_text="Of the newest table of its region; 0: none yet.")
    haproxy_pid = serializers.IntegerField(source="report.haproxy_pid", default=None, allow_null=True)
    reason = serializers.CharField(help_text="Why it does not run that table.")
    cells = serializers.SerializerMethodField(help_text="Cell -> how this ingress sees it: up, down, drain, …")

    class Meta:
        model = Ingress
        fields = [
            "id", "region", "address", "port", "connected", "last_seen_at", "revision", "wanted_revision",
            "haproxy_pid", "reason", "cells", "created_at",
        ]  # fmt: skip

    @extend_schema_field(serializers.DictField(child=serializers.CharField()))
    def get_cells(self, ingress: Ingress) -> dict[str, str]:
        report = getattr(ingress, "report", None)
        return report.cells if report else {}


class IngressFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")
    connected = filters.BooleanFilter()

    class Meta:
        model = Ingress
        fields: list[str] = []


class IngressViewSet(ReadOnlyModelViewSet[Ingress]):
    """The entrances of applications, one or more per region."""

    serializer_class = IngressSerializer
    filterset_class = IngressFilter
    lookup_field = "id"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("id", "created_at", "region")
    watch_kind = "ingress"
    measured = frozenset({"connected", "last_seen_at", "revision", "haproxy_pid", "reason", "cells", "wanted_revision"})

    def get_queryset(self) -> QuerySet[Ingress]:
        return ingresses_described()
