"""The autoscaler over HTTP: places with a range and their latest check, decisions, and the switch. Ranges and policies
are set with the deployment. Parses and renders; services decide."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field, extend_schema_serializer
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.autoscaling.models import ScalingDecision, ScalingSwitch
from fleet.autoscaling.planning.needs import ScalingRule
from fleet.autoscaling.planning.policy import ScalingMode
from fleet.autoscaling.selectors import scaling_mode, scaling_state, scaling_switch
from fleet.autoscaling.services import autoscaling_pause, autoscaling_resume
from fleet.deployments.models import DeploymentRegion
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.rest.serializers import WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet, ViewSet

Load = serializers.DictField(child=serializers.FloatField(allow_null=True))
LOAD_HELP = (
    "Observed figures: `in_flight` and `queued` concurrent requests; `offered`, the concurrency if none had to wait, "
    "from arrivals and `service_s`, the duration of a request; `autopilot`, the requests that it sends; `late_burn`; "
    "`itl_p95_ms`; `per_cell`, a cell's tested concurrency; `start_up_s`. Empty: no recent report."
)


class ScalingPlaceSerializer(serializers.ModelSerializer[DeploymentRegion]):
    deployment = serializers.CharField(source="deployment_id")
    region = serializers.CharField(source="region_id")
    min = serializers.IntegerField(source="cells_min")
    max = serializers.IntegerField(source="cells_max")
    cells = serializers.IntegerField(help_text="Current target.")
    mode = serializers.SerializerMethodField(help_text="`shadow`: decides without changing anything.")
    acting = serializers.SerializerMethodField(help_text="Whether the last decision was carried out.")
    wanted = serializers.SerializerMethodField(help_text="Target by the latest check; null: none yet.")
    needed = serializers.SerializerMethodField(help_text="Cells that the current load needs; null: unknown.")
    rule = serializers.SerializerMethodField(help_text="The rule that decided; null: no decision yet.")
    reason = serializers.SerializerMethodField()
    load = serializers.SerializerMethodField(help_text=LOAD_HELP)
    looked_at = serializers.DateTimeField(source="scaling_state.looked_at", default=None, allow_null=True)

    class Meta:
        model = DeploymentRegion
        fields = [
            "id", "deployment", "region", "min", "max", "cells", "mode", "acting", "wanted", "needed", "rule", "reason",
            "load", "looked_at",
        ]  # fmt: skip
        examples = {"load": {"per_cell": 16.0, "in_flight": 41.2, "queued": 0.0}}

    @extend_schema_field(serializers.ChoiceField(choices=choices(ScalingMode)))
    def get_mode(self, place: DeploymentRegion) -> str:
        return scaling_mode(place.deployment).value

    def get_acting(self, place: DeploymentRegion) -> bool:
        state = scaling_state(place)
        return state is not None and state.acting

    def get_wanted(self, place: DeploymentRegion) -> int | None:
        state = scaling_state(place)
        return state.wanted if state else None

    def get_needed(self, place: DeploymentRegion) -> int | None:
        state = scaling_state(place)
        return state.needed if state else None

    @extend_schema_field(serializers.ChoiceField(choices=choices(ScalingRule), allow_null=True))
    def get_rule(self, place: DeploymentRegion) -> str | None:
        state = scaling_state(place)
        return state.rule if state else None

    def get_reason(self, place: DeploymentRegion) -> str:
        state = scaling_state(place)
        return state.reason if state else ""

    @extend_schema_field(Load)
    def get_load(self, place: DeploymentRegion) -> dict[str, float | None]:
        state = scaling_state(place)
        return dict(state.load) if state else {}


class ScalingPlaceFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="deployment_id")
    region = filters.CharFilter(field_name="region_id")
    rule = filters.MultipleChoiceFilter(
        field_name="scaling_state__rule", choices=choices(ScalingRule), distinct=False, help_text="May be repeated."
    )


class ScalingPlaceViewSet(ReadOnlyModelViewSet[DeploymentRegion]):
    """Deployments in regions where their cells are a range, each with the autoscaler's latest check."""

    serializer_class = ScalingPlaceSerializer
    filterset_class = ScalingPlaceFilter
    page_order = "id"
    ordering_fields = ("id", "deployment", "region", "cells")
    watch_kind = "scaling-place"
    measured = frozenset({"load", "looked_at", "needed", "reason"})
    aliases = ("scaling",)
    columns = "DEPLOYMENT, REGION, MODE, RANGE=:{min}-{max}, CELLS, WANTED, RULE, REASON"

    def get_queryset(self) -> QuerySet[DeploymentRegion]:
        ranged = DeploymentRegion.objects.filter(cells_max__isnull=False)
        return ranged.select_related("deployment", "scaling_state")


class ScalingDecisionSerializer(serializers.ModelSerializer[ScalingDecision]):
    deployment = serializers.CharField(source="deployment_id")
    region = serializers.CharField(source="region_id")
    was = serializers.IntegerField(help_text="Target by the previous decision.")
    wanted = serializers.IntegerField()
    acted = serializers.BooleanField(help_text="False in shadow mode.")
    rule = serializers.ChoiceField(choices=choices(ScalingRule))
    load = serializers.DictField(child=serializers.FloatField(allow_null=True), help_text=LOAD_HELP)
    observed_s = serializers.FloatField(help_text="Seconds for which it was compared with the actual load.")
    too_few_cell_s = serializers.FloatField(help_text="Cell-seconds needed above the target.")
    too_many_cell_s = serializers.FloatField(help_text="Cell-seconds of the target that were not needed.")
    in_force_cell_s = serializers.FloatField(help_text="Cell-seconds of the target in force.")

    class Meta:
        model = ScalingDecision
        fields = [
            "id", "deployment", "region", "at", "was", "wanted", "acted", "rule", "reason", "load", "observed_s",
            "too_few_cell_s", "too_many_cell_s", "in_force_cell_s",
        ]  # fmt: skip
        examples = {"load": {"per_cell": 16.0, "in_flight": 41.2, "queued": 0.0}}


class ScalingDecisionFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="deployment_id")
    region = filters.CharFilter(field_name="region_id")
    acted = filters.BooleanFilter()
    rule = filters.MultipleChoiceFilter(choices=choices(ScalingRule), distinct=False, help_text="May be repeated.")
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At or after.")


class ScalingDecisionViewSet(ReadOnlyModelViewSet[ScalingDecision]):
    """Decisions that changed the target, with reason and regret so far, newest first. The last 200 of each place."""

    queryset = ScalingDecision.objects.all()
    serializer_class = ScalingDecisionSerializer
    filterset_class = ScalingDecisionFilter
    page_order = "-id"
    ordering_fields = ("id", "at", "deployment", "region", "wanted", "rule")
    watch_kind = "scaling-decision"
    measured = frozenset({"observed_s", "too_few_cell_s", "too_many_cell_s", "in_force_cell_s"})
    columns = (
        "AGO=at:age, DEPLOYMENT, REGION, WAS, WANTED, ACTED, RULE, TOO FEW=too_few_cell_s, "
        "TOO MANY=too_many_cell_s, REASON"
    )


@extend_schema_serializer(many=False)
class ScalingSwitchSerializer(serializers.ModelSerializer[ScalingSwitch]):
    paused = serializers.BooleanField(help_text="Whether the autoscaler changes nothing.")
    why = serializers.CharField()
    actor = serializers.CharField(help_text="The user who set it; empty: never set.")
    changed_at = serializers.DateTimeField(allow_null=True)

    class Meta:
        model = ScalingSwitch
        fields = ["paused", "why", "actor", "changed_at"]


class AutoscalingViewSet(ViewSet):
    """The switch that pauses the autoscaler in the whole fleet."""

    @extend_schema(operation_id="autoscaling_show", responses={200: ScalingSwitchSerializer})
    def list(self, request: Request) -> Response:
        """Whether the autoscaler is paused, since when and why."""
        return Response(ScalingSwitchSerializer(scaling_switch()).data)

    @extend_schema(request=WhySerializer, responses={200: ScalingSwitchSerializer})
    @action(detail=False, methods=["post"])
    def pause(self, request: Request) -> Response:
        """Pauses the autoscaler in the whole fleet. It keeps deciding as in shadow mode. Cells stay unchanged."""
        return self._set(request, autoscaling_pause)

    @extend_schema(request=WhySerializer, responses={200: ScalingSwitchSerializer})
    @action(detail=False, methods=["post"])
    def resume(self, request: Request) -> Response:
        """Resumes the autoscaler where policies let it act. Missing cells start immediately; surplus ones stop after
        the agreement time."""
        return self._set(request, autoscaling_resume)

    def _set(self, request: Request, service: Any) -> Response:
        body = body_of(request, WhySerializer)
        row = service(actor=actor_of(request), now=clock.now(), why=body["why"])
        return Response(ScalingSwitchSerializer(row).data)


ROUTES = (
    ("autoscaling/places", ScalingPlaceViewSet, "scaling-place"),
    ("autoscaling/decisions", ScalingDecisionViewSet, "scaling-decision"),
    ("autoscaling", AutoscalingViewSet, "autoscaling"),
)
