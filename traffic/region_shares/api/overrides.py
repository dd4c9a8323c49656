"""Over HTTP: orders about traffic. Fixed shares and evacuations: preview, give, read, end. Decides nothing."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import Approval
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.access import deployment_in_body
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.region_shares.planning.autopilot import OverrideEffect
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind
from traffic.region_shares.selectors import override_effects
from traffic.region_shares.services.overrides import (
    LONGEST_S,
    SHORTEST_S,
    Terms,
    evacuation_order,
    evacuation_request,
    override_end,
    shares_order,
    shares_request,
)
from traffic.routing.models import TrafficOverride


class OverrideSerializer(serializers.ModelSerializer[TrafficOverride]):
    deployment = serializers.CharField(source="deployment_id", allow_null=True, help_text="null: every deployment.")
    region = serializers.CharField(source="region_id", help_text="The origin of the shares, or the region to empty.")
    shares = serializers.DictField(child=serializers.FloatField(), help_text="Serving region -> share; sums to 1.")
    mode = serializers.CharField(help_text="Of an evacuation: `drill` or `real`.")
    why = serializers.CharField(help_text="The operator's own words.")
    active = serializers.SerializerMethodField(help_text="It holds now.")

    class Meta:
        model = TrafficOverride
        fields = [
            "id", "kind", "deployment", "region", "shares", "mode", "why", "actor", "created_at", "expires_at",
            "ended_at", "end_reason", "active",
        ]  # fmt: skip
        examples = {"mode": ""}

    def get_active(self, order: TrafficOverride) -> bool:
        return order.ended_at is None and order.expires_at > clock.now()


class EvacuationSerializer(OverrideSerializer):
    """An override of kind `evacuation`."""

    class Meta(OverrideSerializer.Meta):
        examples = {"mode": "real", "kind": "evacuation"}


class TermsSerializer(StrictSerializer):
    duration_s = serializers.IntegerField(
        min_value=SHORTEST_S, max_value=LONGEST_S, help_text="It ends by itself after this many seconds."
    )
    why = serializers.CharField(max_length=200, help_text="Your reason, shown while it is in force.")


class FixSerializer(TermsSerializer):
    """Where an origin's requests of a deployment are served, whatever the autopilot would do."""

    deployment = serializers.CharField(max_length=96)
    origin = serializers.CharField(max_length=64)
    shares = serializers.DictField(child=serializers.FloatField(), help_text="Serving region -> share; sums to 1.")


class EvacuationPreviewSerializer(TermsSerializer):
    region = serializers.CharField(max_length=64)
    mode = serializers.ChoiceField(
        choices=choices(EvacuationMode),
        help_text="`drill`: in steps, and only what fits elsewhere. `real`: everything at once.",
    )
    deployment = serializers.CharField(
        max_length=96, required=False, allow_blank=True, default="", help_text="Only this one; all if left out."
    )


class EvacuateSerializer(EvacuationPreviewSerializer):
    """A region that serves nothing of what others can, until the order ends."""

    confirm = serializers.CharField(max_length=64, help_text="The region's name once more.")

    class Meta:
        examples = {"confirm": "us-east-1"}


class RegionEffectSerializer(serializers.Serializer[Any]):
    """In requests at once; utilisations of what the region was tested for, null where it has no capacity."""

    region = serializers.CharField()
    capacity = serializers.FloatField()
    load_before = serializers.FloatField()
    load_after = serializers.FloatField()
    receives = serializers.FloatField(help_text="More, or with a minus less, than before.")
    utilisation_before = serializers.FloatField(allow_null=True)
    utilisation_after = serializers.FloatField(allow_null=True)


class EffectSerializer(serializers.Serializer[OverrideEffect]):
    """One deployment, once all has moved."""

    deployment = serializers.CharField()
    shares = serializers.DictField(
        source="matrix", child=serializers.DictField(child=serializers.FloatField()), help_text="As in a matrix."
    )
    regions = RegionEffectSerializer(many=True)
    unplaced = serializers.DictField(
        child=serializers.FloatField(), help_text="Origin -> requests at once that fit below no cap."
    )
    over_cap = serializers.ListField(child=serializers.CharField(), help_text="Regions that would exceed their cap.")

    class Meta:
        examples = {"shares": {"us-east-1": {"us-west-2": 1.0}, "us-west-2": {"us-west-2": 1.0}}, "over_cap": []}


class EffectsSerializer(serializers.Serializer[Any]):
    """What an order would do, by deployment. Nothing was changed."""

    effects = EffectSerializer(many=True)


class EvacuationFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="deployment_id")
    region = filters.CharFilter(field_name="region_id")
    ended = filters.BooleanFilter(field_name="ended_at", lookup_expr="isnull", exclude=True)

    class Meta:
        model = TrafficOverride
        fields: list[str] = []


class OverrideFilter(EvacuationFilter):
    kind = filters.ChoiceFilter(choices=choices(OverrideKind))


class OverrideViewSet(ReadOnlyModelViewSet[TrafficOverride]):
    """Every order of operators about traffic, evacuations too, newest first."""

    serializer_class = OverrideSerializer
    filterset_class = OverrideFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "-id"
    reads = frozenset({"preview"})
    ordering_fields = ("id", "kind", "created_at", "expires_at", "ended_at", "deployment", "region")
    watch_kind = "override"
    measured = frozenset({"active"})
    aliases = ("ov",)
    columns = "ID, KIND, REGION, DEPLOYMENT, ACTIVE, MODE, ACTOR, WHY"

    def deployment_of(self, order: TrafficOverride) -> str:
        return order.deployment_id or ""

    def requested_deployment(self, request: Request) -> str:
        return deployment_in_body(request)

    def get_queryset(self) -> QuerySet[TrafficOverride]:
        return TrafficOverride.objects.all()

    @extend_schema(
        operation_id="traffic_overrides_fix",
        request=FixSerializer,
        responses={200: OverrideSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Fix where an origin's requests of a deployment are served. It holds at once, even above caps and while the
        autopilot holds; residency and closed regions bind it. What was fixed there before ends. 202 with a request for
        shares that empty a region, where evacuations take two people."""
        order = shares_request(**_checked(FixSerializer, request))
        if isinstance(order, Approval):
            return waiting(order)
        return Response(self.get_serializer(order).data)

    @extend_schema(operation_id="traffic_overrides_preview", request=FixSerializer, responses={200: EffectsSerializer})
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """What fixing these shares would do. Changes nothing; refuses what giving the order would refuse."""
        return _effects(shares_order(**_checked(FixSerializer, request)))

    @extend_schema(operation_id="traffic_overrides_end", request=WhySerializer, responses={200: OverrideSerializer})
    @action(detail=True, methods=["post"])
    def end(self, request: Request, id: str) -> Response:
        """End an order, or an evacuation, before its time; requests go back in steps. 409 if it has ended."""
        order = self.get_object()
        body = WhySerializer(data=request.data)
        body.is_valid(raise_exception=True)
        override_end(override_id=order.pk, actor=actor_of(request), now=clock.now(), why=body.validated_data["why"])
        return Response(self.get_serializer(self.get_object()).data)


class EvacuationViewSet(ReadOnlyModelViewSet[TrafficOverride]):
    """Evacuations of regions, newest first. One is ended as any override is."""

    serializer_class = EvacuationSerializer
    filterset_class = EvacuationFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "-id"
    reads = frozenset({"preview"})
    ordering_fields = ("id", "created_at", "expires_at", "ended_at", "deployment", "region")
    watch_kind = "evacuation"
    measured = frozenset({"active"})
    columns = "ID, REGION, DEPLOYMENT, ACTIVE, MODE, ACTOR, WHY"

    def requested_deployment(self, request: Request) -> str:
        return deployment_in_body(request)

    def get_queryset(self) -> QuerySet[TrafficOverride]:
        return TrafficOverride.objects.filter(kind=OverrideKind.EVACUATION.value)

    @extend_schema(
        operation_id="traffic_evacuations_start",
        request=EvacuateSerializer,
        responses={200: EvacuationSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Empty a region of what others can serve: for real at once, or as a drill in steps and only what fits. Its
        ingress goes on and sends requests elsewhere. An evacuation of the same that holds already ends. 202 where it
        needs two-person approval: it begins when another admin approves the request."""
        order = evacuation_request(**_checked(EvacuateSerializer, request))
        if isinstance(order, Approval):
            return waiting(order)
        return Response(self.get_serializer(order).data)

    @extend_schema(
        operation_id="traffic_evacuations_preview",
        request=EvacuationPreviewSerializer,
        responses={200: EffectsSerializer},
    )
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Who would receive what, how full they would be, and what fits nowhere. Changes nothing."""
        return _effects(evacuation_order(**_checked(EvacuationPreviewSerializer, request)))


def _checked(body: type[TermsSerializer], request: Request) -> dict[str, Any]:
    """The fields of a request, with its actor and time, as the services take it."""
    request_body = body(data=request.data)
    request_body.is_valid(raise_exception=True)
    fields = dict(request_body.validated_data)
    terms = Terms(fields.pop("duration_s"), fields.pop("why"), actor_of(request), clock.now())
    return {**fields, "terms": terms}


def _effects(order: TrafficOverride) -> Response:
    return Response(EffectsSerializer({"effects": override_effects(order, clock.now())}).data)
