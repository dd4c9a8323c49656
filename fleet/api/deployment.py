"""Deployments over HTTP: read them, scale one. Decides nothing; the service does."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_field, extend_schema_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.kernel import clock
from controlplane.kernel.requests import StrictSerializer, actor_of
from controlplane.kernel.rest.view_sets import ReadOnlyModelViewSet
from fleet.api import examples
from fleet.models import Deployment
from fleet.planning.states import ServingClass, choices
from fleet.selectors.cell import ready_cells_by_place
from fleet.selectors.deployment import deployments_described
from fleet.services.deployment import CELLS_PER_REGION_MAX, deployment_scale


class PlaceSerializer(serializers.Serializer[Any]):
    region = serializers.CharField()
    cells = serializers.IntegerField(help_text="How many there should be.")
    ready = serializers.IntegerField(help_text="How many serve now.")


@extend_schema_serializer(examples=[OpenApiExample("deployment", examples.DEPLOYMENT, response_only=True)])
class DeploymentSerializer(serializers.ModelSerializer[Deployment]):
    # The context holds, under `ready`, (deployment, region) -> number of ready cells.
    model_version = serializers.CharField(source="model_version.reference", help_text="`model@version`")
    instance_type = serializers.CharField(source="instance_type_id")
    regions = serializers.SerializerMethodField(help_text="In the order of names.")

    class Meta:
        model = Deployment
        fields = [
            "name", "model_version", "serving_class", "instance_type", "drain_deadline_s", "regions", "created_at",
        ]  # fmt: skip

    @extend_schema_field(PlaceSerializer(many=True))
    def get_regions(self, deployment: Deployment) -> list[dict[str, Any]]:
        ready: dict[tuple[str, str], int] = self.context["ready"]
        return [
            {
                "region": place.region_id,
                "cells": place.cells,
                "ready": ready.get((deployment.name, place.region_id), 0),
            }
            for place in deployment.regions.all()
        ]


class WantedCellsSerializer(StrictSerializer):
    """How many cells a region should have."""

    region = serializers.CharField(max_length=64)
    cells = serializers.IntegerField(min_value=0, max_value=CELLS_PER_REGION_MAX)


@extend_schema_serializer(examples=[OpenApiExample("one more in one region", examples.SCALE, request_only=True)])
class ScaleSerializer(StrictSerializer):
    """Regions that are not named stay as they are."""

    regions = serializers.ListField(child=WantedCellsSerializer(), min_length=1)

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names = [place["region"] for place in wanted]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise serializers.ValidationError(f"each region once; more than once here: {', '.join(twice)}", "unique")
        return wanted


class DeploymentFilter(filters.FilterSet):
    serving_class = filters.ChoiceFilter(choices=choices(ServingClass))
    region = filters.CharFilter(field_name="regions__region_id", help_text="Should serve in this region.")
    model = filters.CharFilter(field_name="model_version__model_id")
    instance_type = filters.CharFilter(field_name="instance_type_id")

    class Meta:
        model = Deployment
        fields: list[str] = []


class DeploymentViewSet(ReadOnlyModelViewSet[Deployment]):
    """Which model version serves, where, and with how many cells."""

    serializer_class = DeploymentSerializer
    filterset_class = DeploymentFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "serving_class", "created_at", "instance_type")
    watch_kind = "deployment"
    measured = frozenset({"ready"})

    def deployment_of(self, deployment: Deployment) -> str:
        return deployment.name

    def get_queryset(self) -> QuerySet[Deployment]:
        return deployments_described()

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "ready": ready_cells_by_place()}

    @extend_schema(operation_id="deployments_scale", request=ScaleSerializer, responses={200: DeploymentSerializer})
    def partial_update(self, request: Request, name: str) -> Response:
        """Set the number of cells in the named regions. New cells are placed on spares, or on nodes that are launched;
        superfluous ones drain first."""
        deployment = self.get_object()
        asked = ScaleSerializer(data=request.data)
        asked.is_valid(raise_exception=True)
        cells = {place["region"]: place["cells"] for place in asked.validated_data["regions"]}
        deployment_scale(name=deployment.name, cells=cells, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(self.get_object()).data)
