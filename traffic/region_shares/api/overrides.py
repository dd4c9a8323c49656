"""Overrides over HTTP: fixed shares and evacuations. Parses, calls one service, renders; decides nothing."""

from typing import Any

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
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from traffic.region_shares.models import TrafficOverride
from traffic.region_shares.planning.autopilot import OverrideEffect
from traffic.region_shares.planning.policy import EvacuationMode, OverrideKind
from traffic.region_shares.selectors.traffic import override_effects
from traffic.region_shares.services.overrides import (
    LONGEST_S,
    SHORTEST_S,
    Terms,
    evacuation_override,
    evacuation_request,
    override_end,
    shares_override,
    shares_request,
)


class OverrideSerializer(serializers.ModelSerializer[TrafficOverride]):
    deployment = serializers.CharField(source="deployment_id", allow_null=True, help_text="Null for every deployment.")
    region = serializers.CharField(source="region_id", help_text="The origin of the shares, or the region to empty.")
    shares = serializers.DictField(
        child=serializers.FloatField(), help_text="Serving region -> share; the sum must be 1."
    )
    mode = serializers.CharField(help_text="For an evacuation: `drill` or `real`.")
    why = serializers.CharField(help_text="The operator's reason.")
    active = serializers.SerializerMethodField(help_text="Whether it is in force.")

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
        min_value=SHORTEST_S, max_value=LONGEST_S, help_text="Expires after this many seconds."
    )
    why = serializers.CharField(
        max_length=200, help_text="Your reason; everyone sees it while the override is in force."
    )


class FixSerializer(TermsSerializer):
    """Fixes where an origin's requests for a deployment are served, regardless of the autopilot."""

    deployment = serializers.CharField(max_length=96)
    origin = serializers.CharField(max_length=64)
    shares = serializers.DictField(
        child=serializers.FloatField(), help_text="Serving region -> share; the sum must be 1."
    )


class EvacuationPreviewSerializer(TermsSerializer):
    region = serializers.CharField(max_length=64)
    mode = serializers.ChoiceField(
        choices=choices(EvacuationMode),
        help_text="`drill` moves in steps and only what fits elsewhere; `real` moves everything immediately.",
    )
    deployment = serializers.CharField(
        max_length=96, required=False, allow_blank=True, default="", help_text="Only this deployment; default: all."
    )


class EvacuateSerializer(EvacuationPreviewSerializer):
    """Evacuates a region: it serves only what no other region can, until the override ends."""

    confirm = serializers.CharField(max_length=64, help_text="The region's name again, to confirm.")

    class Meta:
        examples = {"confirm": "us-east-1"}


class RegionEffectSerializer(serializers.Serializer[Any]):
    """Loads in concurrent requests. Utilisation is relative to tested capacity; null if the region has no capacity."""

    region = serializers.CharField()
    capacity = serializers.FloatField()
    load_before = serializers.FloatField()
    load_after = serializers.FloatField()
    receives = serializers.FloatField(help_text="Change; negative if it falls.")
    utilisation_before = serializers.FloatField(allow_null=True)
    utilisation_after = serializers.FloatField(allow_null=True)


class EffectSerializer(serializers.Serializer[OverrideEffect]):
    """Effect on one deployment after all shifts."""

    deployment = serializers.CharField()
    shares = serializers.DictField(
        source="matrix",
        child=serializers.DictField(child=serializers.FloatField()),
        help_text="Same format as in a matrix.",
    )
    regions = RegionEffectSerializer(many=True)
    unplaced = serializers.DictField(
        child=serializers.FloatField(), help_text="Origin -> concurrent requests that fit below no cap."
    )
    over_cap = serializers.ListField(child=serializers.CharField(), help_text="Regions that would exceed their cap.")

    class Meta:
        examples = {"shares": {"us-east-1": {"us-west-2": 1.0}, "us-west-2": {"us-west-2": 1.0}}, "over_cap": []}


class EffectsSerializer(serializers.Serializer[Any]):
    """Predicted effects of an override, by deployment. Nothing was changed."""

    effects = EffectSerializer(many=True)


class EvacuationFilter(filters.FilterSet):
    deployment = filters.CharFilter(field_name="deployment_id")
    region = filters.CharFilter(field_name="region_id")
    ended = filters.BooleanFilter(field_name="ended_at", lookup_expr="isnull", exclude=True)


class OverrideFilter(EvacuationFilter):
    kind = filters.ChoiceFilter(choices=choices(OverrideKind))


class OverrideViewSet(ReadOnlyModelViewSet[TrafficOverride]):
    """Operators' traffic overrides, including evacuations, newest first."""

    queryset = TrafficOverride.objects.all()
    serializer_class = OverrideSerializer
    filterset_class = OverrideFilter
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

    @extend_schema(
        operation_id="traffic_overrides_fix",
        request=FixSerializer,
        responses={200: OverrideSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Fix where an origin's requests for a deployment are served. This applies immediately, even above caps and
        while the autopilot holds, but within residency and closed regions. It replaces an earlier override of the same
        row. Returns 202 with an approval request if the shares empty a region and evacuations need two people."""
        order = shares_request(**_validated_fields(FixSerializer, request))
        if isinstance(order, Approval):
            return waiting(order)
        return Response(self.get_serializer(order).data)

    @extend_schema(request=FixSerializer, responses={200: EffectsSerializer})
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Predict the effect of these shares. Changes nothing. Rejects the same requests as the real call."""
        return _effects_response(shares_override(**_validated_fields(FixSerializer, request)))

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def end(self, request: Request, id: str) -> Response:
        """End an override or evacuation early; requests return in steps. Returns 409 if it has ended."""
        return self.act_on_object(request, override_end, "override_id")


class EvacuationViewSet(ReadOnlyModelViewSet[TrafficOverride]):
    """Evacuations of regions, newest first. An evacuation ends like any override."""

    queryset = TrafficOverride.objects.filter(kind=OverrideKind.EVACUATION.value)
    serializer_class = EvacuationSerializer
    filterset_class = EvacuationFilter
    page_order = "-id"
    reads = frozenset({"preview"})
    ordering_fields = ("id", "created_at", "expires_at", "ended_at", "deployment", "region")
    watch_kind = "evacuation"
    measured = frozenset({"active"})
    columns = "ID, REGION, DEPLOYMENT, ACTIVE, MODE, ACTOR, WHY"

    def requested_deployment(self, request: Request) -> str:
        return deployment_in_body(request)

    @extend_schema(
        operation_id="traffic_evacuations_start",
        request=EvacuateSerializer,
        responses={200: EvacuationSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Evacuate a region: immediately (`real`), or in steps and only as far as other regions have room (`drill`).
        Its ingress keeps running and forwards requests. Replaces an evacuation of the same region. Returns 202 if it
        needs two-person approval: it starts when another admin approves."""
        order = evacuation_request(**_validated_fields(EvacuateSerializer, request))
        if isinstance(order, Approval):
            return waiting(order)
        return Response(self.get_serializer(order).data)

    @extend_schema(request=EvacuationPreviewSerializer, responses={200: EffectsSerializer})
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Predict where requests would go, the utilisation there, and what fits nowhere. Changes nothing."""
        return _effects_response(evacuation_override(**_validated_fields(EvacuationPreviewSerializer, request)))


def _validated_fields(body: type[TermsSerializer], request: Request) -> dict[str, Any]:
    fields = body_of(request, body)
    terms = Terms(fields.pop("duration_s"), fields.pop("why"), actor_of(request), clock.now())
    return {**fields, "terms": terms}


def _effects_response(order: TrafficOverride) -> Response:
    return Response(EffectsSerializer({"effects": override_effects(order, clock.now())}).data)


ROUTES = (
    ("traffic/overrides", OverrideViewSet, "override"),
    ("traffic/evacuations", EvacuationViewSet, "evacuation"),
)
