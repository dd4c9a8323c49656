"""Rollouts over HTTP: preview, start, read, pause, resume, skip a bake, roll back, abort. Parses and renders; services
decide."""

from collections.abc import Callable
from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import Approval
from fleet.deployments.planner import policy_as_json
from fleet.reconcile.planning.snapshot import Finding
from fleet.reconcile.planning.states import RolloutState, choices
from fleet.rollouts.models import Rollout
from fleet.rollouts.planning.waves import preview_seconds, preview_stages
from fleet.rollouts.selectors import rollouts_described, stage_label
from fleet.rollouts.services import (
    Proposal,
    rollout_abort,
    rollout_pause,
    rollout_propose,
    rollout_resume,
    rollout_roll_back,
    rollout_skip_bake,
    rollout_start_or_request,
)
from kernel import clock
from kernel.access import deployment_in_body
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone

Action = Callable[..., None]


class FailedStartSerializer(serializers.Serializer[Any]):
    cell = serializers.CharField()
    generation = serializers.IntegerField()
    reason = serializers.CharField()


class VerdictSerializer(serializers.Serializer[Any]):
    """The last gate's finding and the numbers it compared; times in milliseconds."""

    finding = serializers.ChoiceField(choices=choices(Finding))
    reason = serializers.CharField()
    numbers = serializers.DictField(child=serializers.FloatField(allow_null=True))

    class Meta:
        examples = {"numbers": {"requests": 412, "errors": 0, "control_requests": 398, "control_errors": 0}}


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    deployment = serializers.CharField(source="deployment_id")
    from_version = serializers.CharField(source="from_version.reference", help_text="`model@version`")
    to_version = serializers.CharField(source="to_version.reference", help_text="`model@version`")
    tone = serializers.ChoiceField(choices=choices(Tone))
    stage = serializers.IntegerField(help_text="Index of the stage. Stages that move no cell are skipped.")
    stage_label = serializers.SerializerMethodField(help_text="Region and share of its cells.")
    region_order = serializers.ListField(child=serializers.CharField(), help_text="The order of updates.")
    policy = serializers.DictField(help_text="The copy that this rollout follows.")
    failed = FailedStartSerializer(many=True, help_text="Failed starts of updated cells.")
    verdict = serializers.SerializerMethodField()
    why = serializers.CharField(help_text="The operator's reason.")

    class Meta:
        model = Rollout
        fields = [
            "id", "deployment", "from_version", "to_version", "state", "tone", "reason", "cause", "why", "stage",
            "stage_label", "region_order", "policy", "failed", "verdict", "actor", "created_at", "state_since",
            "ended_at",
        ]  # fmt: skip
        examples = {"stage_label": "us-east-1 100 %"}

    def get_stage_label(self, rollout: Rollout) -> str:
        return stage_label(rollout)

    @extend_schema_field(VerdictSerializer(allow_null=True))
    def get_verdict(self, rollout: Rollout) -> dict[str, Any] | None:
        return rollout.verdict


class ProposalSerializer(StrictSerializer):
    """The target version of a deployment. `policy` overrides single settings of the deployment's own."""

    deployment = serializers.CharField(max_length=96)
    version = serializers.CharField(max_length=170, help_text="`model@version`")
    policy = serializers.DictField(required=False, default=dict)
    allow_unreleased = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Accept a validated version that is not released.",
    )


class StartSerializer(ProposalSerializer):
    why = serializers.CharField(
        required=False, allow_blank=True, max_length=200, default="", help_text="Your reason, for the timeline."
    )

    class Meta:
        examples = {"policy": {"bake_s": 120}, "why": "faster prefill"}


class SkipSerializer(StrictSerializer):
    why = serializers.CharField(max_length=200, help_text="Your reason, for the timeline.")


class PreviewStageSerializer(serializers.Serializer[Any]):
    index = serializers.IntegerField()
    name = serializers.CharField(source="label")
    region = serializers.CharField()
    cells = serializers.IntegerField(help_text="Cells on the new version at the end of the stage.")
    of = serializers.IntegerField(help_text="Target number of cells in the region.")
    bake_s = serializers.FloatField()

    class Meta:
        examples = {"name": "us-east-1 canary"}


class PreviewSerializer(serializers.Serializer[Proposal]):
    """The effect of a rollout. Nothing was changed."""

    deployment = serializers.CharField()
    from_version = serializers.CharField()
    to_version = serializers.CharField()
    policy = serializers.DictField()
    region_order = serializers.ListField(child=serializers.CharField())
    stages = PreviewStageSerializer(many=True)
    at_least_s = serializers.FloatField(help_text="Minimum duration in seconds: health checks of cells, and bakes.")

    def to_representation(self, instance: Proposal) -> dict[str, Any]:
        stages = preview_stages(instance.policy, instance.wanted, instance.regions, instance.splits)
        return {
            "deployment": instance.deployment.name,
            "from_version": instance.deployment.model_version.reference,
            "to_version": instance.version.reference,
            "policy": policy_as_json(instance.policy),
            "region_order": list(instance.regions),
            "stages": PreviewStageSerializer(stages, many=True).data,
            "at_least_s": preview_seconds(instance.policy, stages),
        }


class RolloutFilter(filters.FilterSet):
    state = filters.MultipleChoiceFilter(choices=choices(RolloutState), distinct=False, help_text="May be repeated.")
    deployment = filters.CharFilter(field_name="deployment_id")
    since = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="gte", help_text="Started at or after.")
    until = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="lt", help_text="Started before.")


class RolloutViewSet(ReadOnlyModelViewSet[Rollout]):
    """Moves of deployments from one version to another, newest first."""

    serializer_class = RolloutSerializer
    filterset_class = RolloutFilter
    lookup_value_regex = r"[0-9]+"
    page_order = "-id"
    reads = frozenset({"preview"})
    ordering_fields = ("id", "state", "created_at", "state_since", "ended_at", "deployment")
    watch_kind = "rollout"
    measured = frozenset({"verdict"})
    aliases = ("ro",)
    columns = (
        "ID, DEPLOYMENT, STATE, FROM=from_version, TO=to_version, STAGE=stage_label, SINCE=state_since:age, REASON"
    )

    def deployment_of(self, rollout: Rollout) -> str:
        return rollout.deployment_id

    def requested_deployment(self, request: Request) -> str:
        return deployment_in_body(request)

    def get_queryset(self) -> QuerySet[Rollout]:
        return rollouts_described()

    @extend_schema(
        operation_id="rollouts_start",
        request=StartSerializer,
        responses={200: RolloutSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Starts a rollout: a canary, then waves region by region, each with a bake and a gate. It replaces an active
        rollout of the deployment. 409 if every cell runs the version already. 202 if a rule requires a second approver:
        it starts when another admin approves the request."""
        payload = body_of(request, StartSerializer)
        why = payload.pop("why")
        proposal = rollout_propose(**payload)
        rollout = rollout_start_or_request(proposal=proposal, actor=actor_of(request), now=clock.now(), why=why)
        if isinstance(rollout, Approval):
            return waiting(rollout)
        return Response(self.get_serializer(self.get_queryset().get(pk=rollout.pk)).data)

    @extend_schema(request=ProposalSerializer, responses={200: PreviewSerializer})
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Returns the stages of a rollout without starting it. Rejects what a start would reject."""
        payload = body_of(request, ProposalSerializer)
        return Response(PreviewSerializer(rollout_propose(**payload)).data)

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def pause(self, request: Request, id: str) -> Response:
        """Pauses the rollout. Cells that are being updated finish. 409 if it is neither running nor baking."""
        return self.act_on_object(request, rollout_pause, "rollout_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, id: str) -> Response:
        """Resumes the current stage; a bake starts over. 409 if it is not paused."""
        return self.act_on_object(request, rollout_resume, "rollout_id")

    @extend_schema(request=SkipSerializer)
    @action(detail=True, methods=["post"], url_path="skip-bake")
    def skip_bake(self, request: Request, id: str) -> Response:
        """Promotes without the gate's verdict. 409 unless it is baking or paused."""
        return self.act_on_object(request, rollout_skip_bake, "rollout_id", SkipSerializer)

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"], url_path="roll-back")
    def roll_back(self, request: Request, id: str) -> Response:
        """Moves every cell back to the previous version. 409 if it has ended."""
        return self.act_on_object(request, rollout_roll_back, "rollout_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def abort(self, request: Request, id: str) -> Response:
        """Ends the rollout. Cells keep the version that they run. 409 if it has ended."""
        return self.act_on_object(request, rollout_abort, "rollout_id")


ROUTES = (("rollouts", RolloutViewSet, "rollout"),)
