"""Forecasts of each series and their past errors over HTTP. Read only."""

from typing import Any

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin

from fleet.capacity.planning.forecast_series import HorizonErrors, horizon_errors
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.demand.models import DemandForecast


class HorizonErrorsSerializer(serializers.Serializer[Any]):
    """Errors of a method at a horizon, over the forecasts of the last 7 days."""

    horizon_s = serializers.IntegerField(help_text="Time until the end of the forecast slot.")
    method = serializers.CharField()
    judged = serializers.IntegerField(help_text="Number of forecasts, one per half hour.")
    wape = serializers.FloatField(
        allow_null=True, help_text="Sum of absolute errors divided by that of loads; null without load."
    )
    p90_held = serializers.FloatField(allow_null=True, help_text="Share of slots that stayed within p90.")
    chosen = serializers.BooleanField(help_text="Whether forecasts use it now.")

    class Meta:
        examples = {"method": "last"}


class DemandForecastSerializer(serializers.ModelSerializer[DemandForecast]):
    deployment = serializers.CharField(source="deployment_id")
    origin = serializers.CharField(source="origin_id", help_text="The region whose applications send it.")
    made_at = serializers.DateTimeField(help_text="Start of the first slot.")
    slot_s = serializers.IntegerField()
    p50 = serializers.ListField(
        child=serializers.FloatField(),
        help_text="Mean concurrent requests of each slot, including waiting ones.",
    )
    p90 = serializers.ListField(child=serializers.FloatField())
    p99 = serializers.ListField(child=serializers.FloatField())
    methods = serializers.ListField(child=serializers.CharField(), help_text="Method of each slot.")
    is_judged = serializers.BooleanField(help_text="Whether its quantiles are based on past errors.")
    horizons = serializers.SerializerMethodField(help_text="Errors so far, by horizon and method.")

    class Meta:
        model = DemandForecast
        fields = [
            "id", "deployment", "origin", "serving_class", "made_at", "slot_s", "p50", "p90", "p99", "methods",
            "is_judged", "horizons",
        ]  # fmt: skip
        examples = {"methods": ["last", "blend"]}

    @extend_schema_field(HorizonErrorsSerializer(many=True))
    def get_horizons(self, forecast: DemandForecast) -> list[dict[str, Any]]:
        rows: tuple[HorizonErrors, ...] = horizon_errors(forecast.ledger)
        return [dict(HorizonErrorsSerializer(row).data) for row in rows]


class ForecastFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="deployment_id")
    origin = filters.CharFilter(field_name="origin_id")
    serving_class = filters.CharFilter()


class ForecastViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[DemandForecast]):
    """Newest forecast of each deployment's load, by origin region and serving class, for a day from `made_at` on. The
    planner makes one every five minutes."""

    queryset = DemandForecast.objects.all()
    serializer_class = DemandForecastSerializer
    filterset_class = ForecastFilter
    page_order = "id"
    ordering_fields = ("id", "deployment", "origin", "serving_class", "made_at")
    columns = "DEPLOYMENT, ORIGIN, CLASS=serving_class, MADE=made_at:age, JUDGED=is_judged"


ROUTES = (("forecasts", ForecastViewSet, "forecast"),)
