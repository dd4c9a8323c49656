"""Over HTTP: which region serves which share of whose requests, and every change of that. Read only."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from fleet.models import Deployment
from fleet.planning.states import choices
from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.models import TrafficMatrix, TrafficShift
from traffic.planning.shift import ShiftKind
from traffic.planning.traffic_policy import MOST_UTILISED

Shares = serializers.DictField(child=serializers.DictField(child=serializers.FloatField()))


class LoadedRegionSerializer(serializers.Serializer[Any]):
    """A region as the last pass saw it, in requests at once."""

    region = serializers.CharField()
    demand = serializers.FloatField(help_text="Of its own applications.")
    load = serializers.FloatField(help_text="What it serves under these shares.")
    capacity = serializers.FloatField(help_text="What it was tested for, the least of the last minute.")
    capacity_now = serializers.FloatField(help_text="What it was tested for, this moment.")


class MatrixSerializer(serializers.ModelSerializer[Deployment]):
    deployment = serializers.CharField(source="name")
    revision = serializers.SerializerMethodField(help_text="Grows with every shift; 0: no plan yet.")
    shares = serializers.SerializerMethodField(help_text="Origin -> serving region -> share of the origin's requests.")
    moved_at = serializers.DateTimeField(source="traffic_matrix.moved_at", default=None, allow_null=True)
    looked_at = serializers.DateTimeField(source="traffic_matrix.looked_at", default=None, allow_null=True)
    held = serializers.SerializerMethodField(help_text="Why the last shares are kept though they may be wrong.")
    held_since = serializers.DateTimeField(source="traffic_matrix.held_since", default=None, allow_null=True)
    utilisation_cap = serializers.SerializerMethodField()
    regions = serializers.SerializerMethodField()
    unplaced = serializers.SerializerMethodField(help_text="Origin -> requests at once that fit below no cap.")

    class Meta:
        model = Deployment
        fields = [
            "deployment", "revision", "shares", "moved_at", "looked_at", "held", "held_since", "utilisation_cap",
            "regions", "unplaced",
        ]  # fmt: skip
        examples = {"shares": {"us-east-1": {"us-east-1": 0.63, "us-west-2": 0.37}, "us-west-2": {"us-west-2": 1.0}}}

    def get_revision(self, deployment: Deployment) -> int:
        return _matrix(deployment).revision

    @extend_schema_field(Shares)
    def get_shares(self, deployment: Deployment) -> dict[str, dict[str, float]]:
        shares: dict[str, dict[str, float]] = _matrix(deployment).shares
        return shares

    def get_held(self, deployment: Deployment) -> str:
        return _matrix(deployment).held

    def get_utilisation_cap(self, deployment: Deployment) -> float:
        return float(_matrix(deployment).figures.get("utilisation_cap", MOST_UTILISED))

    @extend_schema_field(LoadedRegionSerializer(many=True))
    def get_regions(self, deployment: Deployment) -> list[dict[str, Any]]:
        seen = _matrix(deployment).figures.get("regions", {})
        return [{"region": region, **figures} for region, figures in sorted(seen.items())]

    @extend_schema_field(serializers.DictField(child=serializers.FloatField()))
    def get_unplaced(self, deployment: Deployment) -> dict[str, float]:
        unplaced: dict[str, float] = _matrix(deployment).figures.get("unplaced", {})
        return unplaced


def _matrix(deployment: Deployment) -> TrafficMatrix:
    """Its row, or an empty one before the first plan."""
    return getattr(deployment, "traffic_matrix", None) or TrafficMatrix(deployment=deployment)


class MatrixFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="name")

    class Meta:
        model = Deployment
        fields: list[str] = []


class MatrixViewSet(ReadOnlyModelViewSet[Deployment]):
    """The shares in force of each deployment, by its name, with the demand and capacity that they answer to."""

    serializer_class = MatrixSerializer
    filterset_class = MatrixFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name",)
    watch_kind = "matrix"
    row_key = "deployment"
    aliases = ("shares",)
    columns = "DEPLOYMENT, SHARES, REVISION, MOVED=moved_at:age, HELD"

    def get_queryset(self) -> QuerySet[Deployment]:
        return Deployment.objects.select_related("traffic_matrix")


class ShiftSerializer(serializers.ModelSerializer[TrafficShift]):
    deployment = serializers.CharField(source="deployment_id")
    moved = serializers.FloatField(help_text="The share of all requests that went to another region than before.")
    shares = Shares

    class Meta:
        model = TrafficShift
        fields = ["id", "deployment", "revision", "kind", "moved", "reason", "shares", "at"]
        examples = {"shares": {"us-east-1": {"us-east-1": 0.63, "us-west-2": 0.37}, "us-west-2": {"us-west-2": 1.0}}}


class ShiftFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="deployment_id")
    kind = filters.MultipleChoiceFilter(choices=choices(ShiftKind), distinct=False, help_text="May be repeated.")
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At or after.")

    class Meta:
        model = TrafficShift
        fields: list[str] = []


class ShiftViewSet(ReadOnlyModelViewSet[TrafficShift]):
    """Every change of shares with its reason, newest first; of each deployment the last 200."""

    serializer_class = ShiftSerializer
    filterset_class = ShiftFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "-id"
    ordering_fields = ("id", "kind", "moved", "at", "deployment")
    watch_kind = "shift"
    aliases = ("traffic-history",)
    columns = "AGO=at:age, DEPLOYMENT, KIND, MOVED, REASON"

    def get_queryset(self) -> QuerySet[TrafficShift]:
        return TrafficShift.objects.all()
