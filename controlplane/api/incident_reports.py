"""The story of an incident over HTTP, with its impact and its post-mortem as Markdown. Joins what the fleet and the
billing know. Changes nothing."""

from typing import Any

from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.faults.models import Incident
from fleet.faults.planning.report import Postmortem, report_markdown
from fleet.faults.planning.severity import Severity
from fleet.faults.planning.story import StoryPhase
from fleet.faults.selectors.stories import deployments_hit, postmortem_of
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.rest.view_sets import ViewSet
from traffic.usage.selectors.usage import tenants_hit


class StoryPhaseSerializer(serializers.Serializer[Any]):
    phase = serializers.ChoiceField(choices=choices(StoryPhase))
    at = serializers.DateTimeField()
    after_s = serializers.FloatField(help_text="Seconds from the start of the story.")
    lasted_s = serializers.FloatField(help_text="Until the next phase began, or until the end.")


class StoryStepSerializer(serializers.Serializer[Any]):
    phase = serializers.ChoiceField(choices=choices(StoryPhase))
    at = serializers.DateTimeField()
    after_s = serializers.FloatField()
    text = serializers.CharField()
    actor = serializers.CharField(help_text="A user, or `switchyard`.")
    cell = serializers.CharField()
    node = serializers.CharField()


class TenantImpactSerializer(serializers.Serializer[Any]):
    tenant = serializers.CharField(help_text="Empty for requests without a key.")
    failed = serializers.IntegerField()
    requests = serializers.IntegerField()


class ImpactSerializer(serializers.Serializer[Any]):
    places = serializers.ListField(child=serializers.CharField())
    step_s = serializers.IntegerField(allow_null=True, help_text="Length of the counted windows; null: none is kept.")
    requests = serializers.IntegerField()
    failed = serializers.IntegerField()
    retried = serializers.IntegerField(help_text="Answered by another cell; a lower bound.")
    slowed = serializers.IntegerField(help_text="First token later than the objective.")
    tenants = TenantImpactSerializer(many=True, help_text="In the hours of the incident, most failures first.")


class IncidentReportSerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField()
    name = serializers.CharField(help_text="A file name.")
    severity = serializers.ChoiceField(choices=choices(Severity))
    started_at = serializers.DateTimeField()
    lasted_s = serializers.FloatField()
    usual_s = serializers.FloatField(allow_null=True, help_text="Median duration of similar incidents.")
    phases = StoryPhaseSerializer(many=True)
    steps = StoryStepSerializer(many=True, help_text="Oldest first.")
    impact = ImpactSerializer()
    open_points = serializers.ListField(child=serializers.CharField())
    markdown = serializers.CharField(help_text="The post-mortem, with all markup in names escaped.")


class IncidentReportViewSet(ViewSet):
    """Post-mortems of incidents."""

    @extend_schema(responses=IncidentReportSerializer)
    @action(detail=True)
    def report(self, request: Request, id: str) -> Response:
        """The story of an incident: cause, detection, protection, action and recovery, with its impact on requests."""
        incident = Incident.objects.filter(pk=int(id)).prefetch_related("parts", "notes").first()
        if incident is None:
            raise Http404
        now = clock.now()
        tenants = tenants_hit(deployments_hit(incident), incident.opened_at, incident.closed_at or now)
        return Response(IncidentReportSerializer(_fields(postmortem_of(incident, now=now, tenants=tenants))).data)


def _fields(pm: Postmortem) -> dict[str, Any]:
    return {
        "id": pm.number,
        "name": pm.file_name,
        "severity": pm.severity,
        "started_at": pm.story.start,
        "lasted_s": (pm.story.end - pm.story.start).total_seconds(),
        "usual_s": pm.healing.usual_s,
        "phases": pm.story.phases,
        "steps": pm.story.steps,
        "impact": pm.impact,
        "open_points": pm.open_points,
        "markdown": report_markdown(pm),
    }
