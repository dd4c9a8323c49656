"""Ingresses over HTTP, with the table that each runs and its view of the cells, and every revision of the routing
tables."""

from django.db.models import QuerySet
from django.http import Http404
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from kernel.rest.serializers import WhySerializer
from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.routing.models import Ingress, RoutingTable
from traffic.routing.selectors import (
    ingresses_described,
    routing_tables_described,
    table_by_reference,
)
from traffic.routing.services.ingresses import ingress_revoke


class IngressSerializer(serializers.ModelSerializer[Ingress]):
    region = serializers.CharField(source="region_id")
    connected = serializers.BooleanField()
    last_seen_at = serializers.DateTimeField(source="report.last_seen_at", default=None, allow_null=True)
    agent_version = serializers.SerializerMethodField(help_text="Version of its agent; empty if it never reported.")
    revision = serializers.IntegerField(help_text="Of the routing table in force; 0 if none.")
    wanted_revision = serializers.IntegerField(help_text="Of the newest table of its region; 0 if none.")
    haproxy_pid = serializers.IntegerField(source="report.haproxy_pid", default=None, allow_null=True)
    reason = serializers.SerializerMethodField(help_text="Why it runs another table.")
    cells = serializers.SerializerMethodField(help_text="Cell -> its state at this ingress: up, down, drain, …")

    class Meta:
        model = Ingress
        fields = [
            "id", "region", "address", "port", "connected", "last_seen_at", "agent_version", "revision",
            "wanted_revision", "haproxy_pid", "reason", "cells", "created_at",
        ]  # fmt: skip
        examples = {"id": "i-us-east-1", "cells": {"sim-70b-us-east-1-1": "up", "sim-70b-us-east-1-2": "drain"}}

    @extend_schema_field(serializers.CharField())
    def get_agent_version(self, ingress: Ingress) -> str:
        report = getattr(ingress, "report", None)
        return report.agent_version if report else ""

    @extend_schema_field(serializers.CharField())
    def get_reason(self, ingress: Ingress) -> str:
        report = getattr(ingress, "report", None)
        return report.reason if report else ""

    @extend_schema_field(serializers.DictField(child=serializers.CharField()))
    def get_cells(self, ingress: Ingress) -> dict[str, str]:
        report = getattr(ingress, "report", None)
        return report.cells if report else {}


class IngressFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")
    connected = filters.BooleanFilter()


class IngressViewSet(ReadOnlyModelViewSet[Ingress]):
    """HAProxy instances that applications connect to, one or more per region."""

    serializer_class = IngressSerializer
    filterset_class = IngressFilter
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("id", "created_at", "region")
    watch_kind = "ingress"
    measured = frozenset(
        {"connected", "last_seen_at", "agent_version", "revision", "haproxy_pid", "reason", "cells", "wanted_revision"}
    )
    aliases = ("ing",)
    columns = "INGRESS=id, REGION, CONNECTED, REVISION, WANTED=wanted_revision, CELLS"

    def get_queryset(self) -> QuerySet[Ingress]:
        return ingresses_described()

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, id: str) -> Response:
        """Revoke an ingress's credential and certificates. Its WebSocket closes within 5 s. Repeating it changes
        nothing."""
        return self.act_on_object(request, ingress_revoke, "ingress_id")


class RoutingTableSerializer(serializers.ModelSerializer[RoutingTable]):
    id = serializers.SerializerMethodField(help_text="`region@revision`")
    region = serializers.CharField(source="region_id")
    revision = serializers.IntegerField()
    current = serializers.BooleanField(help_text="Whether it is the newest of its region.")

    class Meta:
        model = RoutingTable
        fields = ["id", "region", "revision", "current", "reason", "created_at"]
        examples: dict[str, object] = {"id": "us-east-1@12"}

    def get_id(self, table: RoutingTable) -> str:
        return f"{table.region_id}@{table.revision}"


class RoutingTableDetailSerializer(RoutingTableSerializer):
    body = serializers.DictField(help_text="The table as sent to ingresses.")

    class Meta(RoutingTableSerializer.Meta):
        fields = [*RoutingTableSerializer.Meta.fields, "body"]
        examples = {"body": {"type": "routing_table", "revision": 12, "region": "us-east-1"}}


class RoutingTableFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")
    current = filters.BooleanFilter(help_text="`true`: only the newest of each region.")


class RoutingTableViewSet(ReadOnlyModelViewSet[RoutingTable]):
    """Routing tables of the regions, newest first. The ID of a table is `region@revision`; only the detail has its
    `body`."""

    filterset_class = RoutingTableFilter
    lookup_url_kwarg = "id"
    lookup_value_regex = r"[-\w]+@[0-9]{1,18}"
    page_order = "-id"
    ordering_fields = ("id", "created_at", "region", "revision")
    watch_kind = "routing-table"
    aliases = ("rt",)
    columns = "TABLE=id, CURRENT, AGE=created_at:age, REASON"

    def get_queryset(self) -> QuerySet[RoutingTable]:
        tables = routing_tables_described()
        return tables if self.detail else tables.defer("body")

    def get_serializer_class(self) -> type[RoutingTableSerializer]:
        return RoutingTableDetailSerializer if self.detail else RoutingTableSerializer

    def watch_key(self, row: RoutingTable) -> str:
        return f"{row.region_id}@{row.revision}"

    def get_object(self) -> RoutingTable:
        table = table_by_reference(self.filter_queryset(self.get_queryset()), self.kwargs["id"])
        if table is None:
            raise Http404
        return table


ROUTES = (
    ("ingresses", IngressViewSet, "ingress"),
    ("routing-tables", RoutingTableViewSet, "routing-table"),
)
