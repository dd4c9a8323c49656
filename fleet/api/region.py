"""Regions and instance types over HTTP: where nodes are, and what they are. Read only."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from controlplane.kernel.rest.view_sets import ReadOnlyModelViewSet
from fleet.api import examples
from fleet.models import InstanceType, Region
from fleet.planning.states import CellState, NodeState
from fleet.selectors.cell import cell_counts_by_region
from fleet.selectors.node import node_counts_by_region

Counts = serializers.DictField(child=serializers.IntegerField())


@extend_schema_serializer(examples=[OpenApiExample("region", examples.REGION, response_only=True)])
class RegionSerializer(serializers.ModelSerializer[Region]):
    # The context holds the counts of all regions, under `nodes` and `cells`: region -> state -> number.
    spares = serializers.SerializerMethodField(help_text="Instance type -> how many idle nodes to keep warm.")
    repair_only = serializers.SerializerMethodField(help_text="How many of them new cells must leave to repairs.")
    ingress_url = serializers.CharField(help_text="Where applications of this region send requests.")
    nodes = serializers.SerializerMethodField(help_text="State -> number of nodes, without retired ones.")
    cells = serializers.SerializerMethodField(help_text="State -> number of cells, without stopped ones.")

    class Meta:
        model = Region
        fields = ["name", "provider", "ingress_url", "spares", "repair_only", "nodes", "cells"]

    @extend_schema_field(Counts)
    def get_spares(self, region: Region) -> dict[str, int]:
        return {kind: spares.warm for kind, spares in region.warm_spares().items()}

    @extend_schema_field(Counts)
    def get_repair_only(self, region: Region) -> dict[str, int]:
        return {kind: spares.repair_only for kind, spares in region.warm_spares().items()}

    @extend_schema_field(Counts)
    def get_nodes(self, region: Region) -> dict[str, int]:
        return _every_state(NodeState, NodeState.RETIRED, self.context["nodes"].get(region.name, {}))

    @extend_schema_field(Counts)
    def get_cells(self, region: Region) -> dict[str, int]:
        return _every_state(CellState, CellState.STOPPED, self.context["cells"].get(region.name, {}))


def _every_state(states: type[StrEnum], ended: StrEnum, counts: Mapping[str, int]) -> dict[str, int]:
    return {state.value: counts.get(state.value, 0) for state in states if state is not ended}


class RegionFilter(filters.FilterSet):
    provider = filters.CharFilter()

    class Meta:
        model = Region
        fields: list[str] = []


class RegionViewSet(ReadOnlyModelViewSet[Region]):
    """Failure and latency domains, each with its own ingress and nodes."""

    serializer_class = RegionSerializer
    filterset_class = RegionFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "position", "provider")
    watch_kind = "region"
    measured = frozenset({"nodes", "cells"})

    def get_queryset(self) -> QuerySet[Region]:
        return Region.objects.all()

    def get_serializer_context(self) -> dict[str, Any]:
        return {
            **super().get_serializer_context(),
            "nodes": node_counts_by_region(),
            "cells": cell_counts_by_region(),
        }


@extend_schema_serializer(examples=[OpenApiExample("instance type", examples.INSTANCE_TYPE, response_only=True)])
class InstanceTypeSerializer(serializers.ModelSerializer[InstanceType]):
    class Meta:
        model = InstanceType
        fields = [
            "name", "accelerator", "chips", "cores", "memory_gib", "price_per_hour", "watts",
            "tensor_parallel_degree",
        ]  # fmt: skip


class InstanceTypeFilter(filters.FilterSet):
    accelerator = filters.CharFilter()

    class Meta:
        model = InstanceType
        fields: list[str] = []


class InstanceTypeViewSet(ReadOnlyModelViewSet[InstanceType]):
    """Kinds of machines. Prices in US dollars."""

    serializer_class = InstanceTypeSerializer
    filterset_class = InstanceTypeFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "accelerator", "chips", "memory_gib", "price_per_hour", "watts")
    watch_kind = "instance-type"

    def get_queryset(self) -> QuerySet[InstanceType]:
        return InstanceType.objects.all()
