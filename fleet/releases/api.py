"""Releases of the agent and their rollouts over HTTP: parses requests and calls services. Never decides."""

from typing import Any

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.reconcile.planning.states import AgentRolloutState, choices
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.releases.selectors import agents_by_release
from fleet.releases.services.releases import DEFAULT_SOAK_S, LONGEST_SOAK_S, agent_rollout_begin, agent_rollout_cancel
from kernel import clock
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone


class AgentReleaseSerializer(serializers.ModelSerializer[AgentRelease]):
    protocol = serializers.IntegerField(help_text="Protocol of its agents; this and the previous one are supported.")
    is_current = serializers.BooleanField(help_text="Whether new agents run it, and others catch up to it.")
    archives = serializers.DictField(help_text="Python and processor -> archive for joining hosts.")
    agents = serializers.SerializerMethodField(
        help_text="Agents that run it, by ID; a machine includes its node or ingress."
    )

    class Meta:
        model = AgentRelease
        fields = ["id", "version", "protocol", "is_current", "archives", "agents", "created_at"]
        examples = {"id": "3fa9c0de81b2745a", "version": "0.1.0", "agents": ["i-us-east-1", "n-0a1b2c3d"]}

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_agents(self, release: AgentRelease) -> list[str]:
        found: dict[str, list[str]] = self.context["agents"]
        return found.get(release.id, [])


class AgentReleaseViewSet(ReadOnlyModelViewSet[AgentRelease]):
    """Releases of the agent, and the agents that run them."""

    queryset = AgentRelease.objects.all()
    serializer_class = AgentReleaseSerializer
    lookup_value_regex = r"[0-9a-f]{1,16}"
    ordering_fields = ("id", "created_at")
    watch_kind = "agent-release"
    measured = frozenset({"agents"})
    columns = "RELEASE=id, VERSION, PROTOCOL, CURRENT=is_current, RUN BY=agents:count, AGENTS, AGE=created_at:age"

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "agents": agents_by_release()}


class AgentMoveSerializer(serializers.ModelSerializer[AgentMove]):
    class Meta:
        model = AgentMove
        fields = ["agent", "ring", "release", "moved_at", "settled_at", "trouble"]
        examples = {"agent": "n-0a1b2c3d"}


class AgentRolloutSerializer(serializers.ModelSerializer[AgentRollout]):
    from_release = serializers.CharField(source="source_id")
    to_release = serializers.CharField(source="target_id")
    state = serializers.ChoiceField(choices=choices(AgentRolloutState))
    tone = serializers.ChoiceField(choices=choices(Tone))
    ring = serializers.IntegerField(help_text="The current ring, from 0: one agent, a tenth, all others.")
    soak_s = serializers.FloatField(help_text="How long a ring must be healthy before the next starts.")
    moves = AgentMoveSerializer(many=True, help_text="The agents of each ring; empty once a later rollout has begun.")

    class Meta:
        model = AgentRollout
        fields = [
            "id", "from_release", "to_release", "state", "tone", "reason", "why", "ring", "rings", "soak_s", "actor",
            "moves", "created_at", "ring_since", "ended_at",
        ]  # fmt: skip
        examples = {"from_release": "8e83b4e031e30dde", "to_release": "3fa9c0de81b2745a"}


class UpgradeSerializer(StrictSerializer):
    release = serializers.CharField(
        max_length=16,
        required=False,
        allow_blank=True,
        default="",
        help_text="This control plane's release if empty.",
    )
    soak_s = serializers.FloatField(min_value=0, max_value=LONGEST_SOAK_S, default=DEFAULT_SOAK_S)
    why = serializers.CharField(
        required=False, allow_blank=True, max_length=200, default="", help_text="Your reason, for the timeline."
    )

    class Meta:
        examples = {"soak_s": 30}


class AgentRolloutFilter(filters.FilterSet):
    state = filters.MultipleChoiceFilter(
        choices=choices(AgentRolloutState), distinct=False, help_text="May be repeated."
    )


class AgentRolloutViewSet(ReadOnlyModelViewSet[AgentRollout]):
    """Rollouts of agent releases, newest first."""

    queryset = AgentRollout.objects.prefetch_related("moves")
    serializer_class = AgentRolloutSerializer
    filterset_class = AgentRolloutFilter
    page_order = "-id"
    ordering_fields = ("id", "state", "created_at", "ended_at")
    watch_kind = "agent-rollout"
    measured = frozenset({"moves"})
    columns = "ID, STATE, FROM=from_release, TO=to_release, RING, BY=actor, REASON, AGE=created_at:age"

    @extend_schema(operation_id="agents_upgrade", request=UpgradeSerializer)
    def create(self, request: Request) -> Response:
        """Start to move all agents to a release: one, then a tenth, then all others; each ring is watched before the
        next. Engines and HAProxies keep running. The rollout goes back automatically if an agent or its engine changes
        for the worse. 409 while another one is under way, and if all agents run the release."""
        payload = body_of(request, UpgradeSerializer)
        rollout = agent_rollout_begin(actor=actor_of(request), now=clock.now(), **payload)
        return Response(self.get_serializer(self.get_queryset().get(pk=rollout.pk)).data)

    @extend_schema(operation_id="agents_upgrade_cancel", request=WhySerializer)
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, id: str) -> Response:
        """Move the agents back to the previous release. 409 if the rollout is going back or is over."""
        return self.act_on_object(request, agent_rollout_cancel, "rollout_id")


ROUTES = (
    ("agents/releases", AgentReleaseViewSet, "agent-release"),
    ("agents/rollouts", AgentRolloutViewSet, "agent-rollout"),
)
