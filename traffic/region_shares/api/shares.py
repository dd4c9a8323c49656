"""Region shares with their history (read only) and traffic policies over HTTP. Parses and renders; the service
decides."""

from typing import Any

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.request_limits import LIMIT_ROWS, RequestLimits
from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.rest.serializers import StrictSerializer, actor_of, body_of, struct_fields
from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.region_shares.models import RegionLoss, TrafficMatrix, TrafficRule, TrafficShift
from traffic.region_shares.planning.autopilot import ShiftKind
from traffic.region_shares.planning.policy import MOST_UTILISED, POLICY_HELP, TrafficPolicy, traffic_policy_as_json
from traffic.region_shares.services.overrides import traffic_policy_change

Shares = serializers.DictField(child=serializers.DictField(child=serializers.FloatField()))


class LoadedRegionSerializer(serializers.Serializer[Any]):
    """A region at the last pass, in concurrent requests."""

    region = serializers.CharField()
    demand = serializers.FloatField(help_text="Demand of applications that use its ingresses.")
    load = serializers.FloatField(help_text="Load under these shares.")
    capacity = serializers.FloatField(help_text="Tested capacity, minimum of the last minute.")
    capacity_now = serializers.FloatField(help_text="Tested capacity now.")


class MatrixSerializer(serializers.ModelSerializer[Deployment]):
    deployment = serializers.CharField(source="name")
    revision = serializers.SerializerMethodField(help_text="Grows with every shift; 0 before the first plan.")
    shares = serializers.SerializerMethodField(help_text="Origin -> serving region -> share of the origin's requests.")
    moved_at = serializers.DateTimeField(source="traffic_matrix.moved_at", default=None, allow_null=True)
    looked_at = serializers.DateTimeField(source="traffic_matrix.looked_at", default=None, allow_null=True)
    held = serializers.SerializerMethodField(help_text="Why the last shares are kept although they may be outdated.")
    held_since = serializers.DateTimeField(source="traffic_matrix.held_since", default=None, allow_null=True)
    utilisation_cap = serializers.SerializerMethodField()
    regions = serializers.SerializerMethodField()
    unplaced = serializers.SerializerMethodField(help_text="Origin -> concurrent requests that fit below no cap.")

    class Meta:
        model = Deployment
        fields = [
            "deployment", "revision", "shares", "moved_at", "looked_at", "held", "held_since", "utilisation_cap",
            "regions", "unplaced",
        ]  # fmt: skip
        examples = {"shares": {"us-east-1": {"us-east-1": 0.63, "us-west-2": 0.37}, "us-west-2": {"us-west-2": 1.0}}}

    def get_revision(self, deployment: Deployment) -> int:
        return _matrix_row(deployment).revision

    @extend_schema_field(Shares)
    def get_shares(self, deployment: Deployment) -> dict[str, dict[str, float]]:
        shares: dict[str, dict[str, float]] = _matrix_row(deployment).shares
        return shares

    def get_held(self, deployment: Deployment) -> str:
        return _matrix_row(deployment).held

    def get_utilisation_cap(self, deployment: Deployment) -> float:
        return float(_matrix_row(deployment).figures.get("utilisation_cap", MOST_UTILISED))

    @extend_schema_field(LoadedRegionSerializer(many=True))
    def get_regions(self, deployment: Deployment) -> list[dict[str, Any]]:
        seen = _matrix_row(deployment).figures.get("regions", {})
        return [{"region": region, **figures} for region, figures in sorted(seen.items())]

    @extend_schema_field(serializers.DictField(child=serializers.FloatField()))
    def get_unplaced(self, deployment: Deployment) -> dict[str, float]:
        unplaced: dict[str, float] = _matrix_row(deployment).figures.get("unplaced", {})
        return unplaced


def _matrix_row(deployment: Deployment) -> TrafficMatrix:
    return getattr(deployment, "traffic_matrix", None) or TrafficMatrix(deployment=deployment)


class MatrixFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="name")


class MatrixViewSet(ReadOnlyModelViewSet[Deployment]):
    """Region shares in force, by deployment, with the demand and capacity that they are based on."""

    queryset = Deployment.objects.select_related("traffic_matrix")
    serializer_class = MatrixSerializer
    filterset_class = MatrixFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name",)
    watch_kind = "matrix"
    row_key = "deployment"
    aliases = ("shares",)
    columns = "DEPLOYMENT, SHARES, REVISION, MOVED=moved_at:age, HELD"


class ShiftSerializer(serializers.ModelSerializer[TrafficShift]):
    deployment = serializers.CharField(source="deployment_id")
    moved = serializers.FloatField(help_text="Share of all requests that changed region.")
    shares = Shares

    class Meta:
        model = TrafficShift
        fields = ["id", "deployment", "revision", "kind", "moved", "reason", "shares", "at"]
        examples = {"shares": {"us-east-1": {"us-east-1": 0.63, "us-west-2": 0.37}, "us-west-2": {"us-west-2": 1.0}}}


class ShiftFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="deployment_id")
    kind = filters.MultipleChoiceFilter(choices=choices(ShiftKind), distinct=False, help_text="May be repeated.")
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At or after.")


class ShiftViewSet(ReadOnlyModelViewSet[TrafficShift]):
    """Changes of shares with their reasons, newest first; the last 200 of each deployment."""

    queryset = TrafficShift.objects.all()
    serializer_class = ShiftSerializer
    filterset_class = ShiftFilter
    page_order = "-id"
    ordering_fields = ("id", "kind", "moved", "at", "deployment")
    watch_kind = "shift"
    aliases = ("traffic-history",)
    columns = "AGO=at:age, DEPLOYMENT, KIND, MOVED, REASON"


def _limit_fields(*, required: bool) -> dict[str, Any]:
    return {
        row.name: serializers.IntegerField(help_text=f"Maximum {row.counts}.", required=required) for row in LIMIT_ROWS
    }


class RequestLimitsSerializer(serializers.Serializer[RequestLimits]):
    """Most work that one request may ask of a cell. Larger requests get 400."""

    def get_fields(self) -> dict[str, Any]:
        return _limit_fields(required=True)


class RequestLimitsChangeSerializer(StrictSerializer):
    """Omitted fields keep their value."""

    def get_fields(self) -> dict[str, Any]:
        return _limit_fields(required=False)


class TrafficPolicySerializer(serializers.Serializer[Deployment]):
    """The whole policy, including defaults. Utilisations are relative to tested capacity."""

    deployment = serializers.CharField()
    request_limits = RequestLimitsSerializer(help_text=POLICY_HELP["request_limits"])
    revision = serializers.IntegerField(help_text="Grows with every change; 0 if all values are defaults.")
    actor = serializers.CharField(help_text="Last editor.")
    changed_at = serializers.DateTimeField(allow_null=True)

    def get_fields(self) -> dict[str, Any]:
        declared = super().get_fields()
        return {"deployment": declared["deployment"]} | struct_fields(TrafficPolicy, POLICY_HELP) | declared

    class Meta:
        examples = {
            "routing": "sticky",
            "cost": {"us-east-1": 1.0, "us-west-2": 0.8},
            "tested_by_type": {"trn1.32xlarge": 16, "inf2.48xlarge": 8},
            "split": {"sim-70b": 95, "sim-70b-next": 5},
        }

    def to_representation(self, instance: Deployment) -> dict[str, Any]:
        rule: TrafficRule | None = getattr(instance, "traffic_rule", None)
        return super().to_representation(
            {
                "deployment": instance.name,
                **traffic_policy_as_json(rule.policy() if rule else TrafficPolicy()),
                "revision": rule.revision if rule else 0,
                "actor": rule.actor if rule else "",
                "changed_at": rule.changed_at if rule else None,
            }  # type: ignore[arg-type]
        )


class TrafficPolicyChangeSerializer(StrictSerializer):
    """Omitted fields keep their value."""

    request_limits = RequestLimitsChangeSerializer(required=False)

    def get_fields(self) -> dict[str, Any]:
        return struct_fields(TrafficPolicy, POLICY_HELP, required=False) | super().get_fields()

    class Meta:
        examples = {"cost": {"us-west-2": 0.8}, "utilisation_cap": 0.75}


class TrafficPolicyFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="name")


class TrafficPolicyViewSet(ReadOnlyModelViewSet[Deployment]):
    """Traffic policy of a deployment: where its requests may be served, the price of regions, and caps on their
    utilisation."""

    queryset = Deployment.objects.select_related("traffic_rule")
    serializer_class = TrafficPolicySerializer
    filterset_class = TrafficPolicyFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name",)
    watch_kind = "traffic-policy"
    row_key = "deployment"
    aliases = ("policies", "tp")
    columns = "DEPLOYMENT, CAP=utilisation_cap, COST, RESIDENCY, SPLIT, REVISION"

    def deployment_of(self, deployment: Deployment) -> str:
        return deployment.name

    @extend_schema(request=TrafficPolicyChangeSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Change parts of the policy. Residency applies from the next routing table on; prices and caps move requests
        in steps."""
        deployment = self.get_object()
        body = body_of(request, TrafficPolicyChangeSerializer)
        traffic_policy_change(deployment=deployment.name, stated=body, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(self.get_object()).data)


class ShortageSerializer(serializers.Serializer[Any]):
    """A deployment that lacks room, in concurrent requests."""

    deployment = serializers.CharField()
    at = serializers.DateTimeField(help_text="Start of the quarter of an hour in which its forecast load peaks.")
    load = serializers.FloatField(help_text="Its load then in all regions, p90 of the forecasts.")
    unplaced = serializers.FloatField(help_text="The part that finds no room below the utilisation cap.")


class RegionLossSerializer(serializers.ModelSerializer[RegionLoss]):
    region = serializers.CharField(source="region_id")
    deployments = serializers.IntegerField(help_text="Deployments with a forecast.")
    is_judged = serializers.BooleanField(help_text="Whether all forecasts are based on past errors.")
    shortages = ShortageSerializer(many=True, help_text="The largest first; empty: the other regions have room.")

    class Meta:
        model = RegionLoss
        fields = ["region", "made_at", "deployments", "is_judged", "shortages"]


class RegionLossFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")


class RegionLossViewSet(ReadOnlyModelViewSet[RegionLoss]):
    """Shortages after the loss of a region when load peaks in the next day (N+1). Renewed with the forecasts, every
    five minutes; empty without recent ones."""

    queryset = RegionLoss.objects.all()
    serializer_class = RegionLossSerializer
    filterset_class = RegionLossFilter
    lookup_field = "region_id"
    lookup_url_kwarg = "region"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("region_id",)
    row_key = "region"
    columns = "REGION, DEPLOYMENTS, SHORTAGES, MADE=made_at:age, JUDGED=is_judged"


ROUTES = (
    ("traffic/matrices", MatrixViewSet, "matrix"),
    ("traffic/history", ShiftViewSet, "shift"),
    ("traffic/losses", RegionLossViewSet, "region-loss"),
    ("traffic/policies", TrafficPolicyViewSet, "traffic-policy"),
)
