"""What is under way in the fleet, and what waits for a person, over HTTP: the rows of the overview. Never writes."""

from typing import Any

from drf_spectacular.utils import extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.in_progress import in_progress, needs_a_person
from kernel import clock
from kernel.access import access_of
from kernel.rest.view_sets import ViewSet


class OperationSerializer(serializers.Serializer[Any]):
    """An operation, or similar ones in one place."""

    id = serializers.CharField(help_text="Unique while it lasts.")
    kind = serializers.CharField(help_text="Such as Rollout, Evacuation or Paused rollout.")
    what = serializers.CharField(help_text="The object, or the place of several.")
    text = serializers.CharField(help_text="Progress, or what to do.")
    percent = serializers.FloatField(allow_null=True, help_text="Progress in per cent; null: unknown.")
    why = serializers.CharField(help_text="Its reason; empty: none.")
    since = serializers.DateTimeField()
    url = serializers.CharField(help_text="Path of its page.")

    class Meta:
        examples = {"kind": "Rollout", "what": "sim-70b to sim-70b@2", "url": "/rollouts/12/"}


@extend_schema_serializer(many=False)
class OperationsSerializer(serializers.Serializer[Any]):
    in_progress = OperationSerializer(many=True)
    waiting = OperationSerializer(many=True, help_text="Operations that wait for a person.")


class OperationsViewSet(ViewSet):
    """Operations under way, and what waits for a person. Certificates that expire are listed for operators only."""

    @extend_schema(operation_id="operations_show", responses={200: OperationsSerializer})
    def list(self, request: Request) -> Response:
        now = clock.now()
        found = {"in_progress": in_progress(now), "waiting": needs_a_person(now, access_of(request))}
        return Response(OperationsSerializer(found).data)
