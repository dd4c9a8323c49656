"""Schedules of batches, and their runs, for operators. Parses, calls one service, renders; decides nothing."""

from typing import Any

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin, ReadOnlyModelViewSet
from kernel.tones import Tone
from traffic.batch_schedules.models import SETTABLE, BatchRun, BatchSchedule
from traffic.batch_schedules.planner import RunState
from traffic.batch_schedules.services.schedules import (
    batch_schedule_change,
    batch_schedule_create,
    batch_schedule_delete,
    batch_schedule_run,
)


class BatchScheduleSerializer(RecordSerializer[BatchSchedule]):
    key = serializers.CharField(source="key_id", help_text="Prefix of the key of its batches.")
    tenant = serializers.CharField(source="key.tenant")
    when = serializers.CharField()

    class Meta:
        model = BatchSchedule
        fields = [
            "name", "key", "tenant", "when", *SETTABLE, "next_at", "problem", "actor", "created_at", "changed_at",
        ]  # fmt: skip
        examples = {
            "name": "nightly",
            "key": "0a1b2c3d",
            "cron": "30 2 * * *",
            "time_zone": "Europe/Berlin",
            "prefix": "",
            "input": "s3://acme-batches/in/{date}.jsonl",
            "output_uri": "s3://acme-batches/out/{date}",
            "window": "4h",
            "region": "",
        }


class ChangeBatchScheduleSerializer(ColumnsSerializer):
    key = serializers.CharField(max_length=40, required=False, help_text="Prefix of the key of its batches.")

    class Meta:
        model = BatchSchedule
        columns = SETTABLE

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        for name, field in fields.items():
            field.required = False
            field.help_text = getattr(field, "help_text", "") or name
        return {"key": fields.pop("key"), **fields}


class CreateBatchScheduleSerializer(ChangeBatchScheduleSerializer):
    name = serializers.SlugField(max_length=64)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        for name in ("name", "key"):
            fields[name].required = True
        return {"name": fields.pop("name"), **fields}


class BatchRunSerializer(RecordSerializer[BatchRun]):
    schedule = serializers.CharField(source="schedule_id")
    batch = serializers.CharField(source="batch_id", allow_null=True)
    tone = serializers.ChoiceField(choices=choices(Tone))

    class Meta:
        model = BatchRun
        fields = ["id", "schedule", "due_at", "uri", "etag", "state", "tone", "reason", "batch", "started_at"]
        examples = {"schedule": "nightly", "batch": "batch_6f1d0f0d2c3b4a5968778695a4b3c2d1"}


class BatchScheduleFilter(filters.FilterSet):
    tenant = filters.CharFilter(field_name="key__tenant")
    paused = filters.BooleanFilter()


class BatchScheduleViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[BatchSchedule]):
    """Times, or prefixes of a bucket, that create batches of a key."""

    queryset = BatchSchedule.objects.select_related("key")
    serializer_class = BatchScheduleSerializer
    filterset_class = BatchScheduleFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w]+"
    page_order = "name"
    ordering_fields = ("name", "next_at", "created_at")
    columns = "NAME, WHEN, TENANT, KEY, PAUSED, NEXT=next_at, PROBLEM"

    @extend_schema(request=CreateBatchScheduleSerializer)
    def create(self, request: Request) -> Response:
        """Create a schedule. Returns 409 if the name is taken."""
        columns = body_of(request, CreateBatchScheduleSerializer)
        row = batch_schedule_create(actor=actor_of(request), now=clock.now(), **columns)
        return Response(BatchScheduleSerializer(row).data)

    @extend_schema(request=ChangeBatchScheduleSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields. `paused` pauses and resumes it."""
        return self.act_on_object(request, batch_schedule_change, "name", ChangeBatchScheduleSerializer)

    def destroy(self, request: Request, name: str) -> Response:
        """Delete a schedule with its runs, and return it. Its batches continue."""
        return self.remove_object(request, batch_schedule_delete, "name")

    @extend_schema(request=None)
    @action(detail=True, methods=["post"])
    def run(self, request: Request, name: str) -> Response:
        """Add a run for now, or list its prefix in the next pass. Returns 409 if it is paused."""
        return self.act_on_object(request, batch_schedule_run, "name", None)


class BatchRunFilter(filters.FilterSet):
    schedule = filters.CharFilter()
    state = filters.ChoiceFilter(choices=choices(RunState))


class BatchRunViewSet(ReadOnlyModelViewSet[BatchRun]):
    """Times and objects of schedules, newest first, with their batches."""

    queryset = BatchRun.objects.all()
    serializer_class = BatchRunSerializer
    filterset_class = BatchRunFilter
    lookup_value_regex = r"[0-9]+"
    page_order = "-id"
    ordering_fields = ("id", "due_at", "state")
    columns = "ID, SCHEDULE, DUE=due_at, STATE, BATCH, REASON"


ROUTES = (
    ("batch-schedules", BatchScheduleViewSet, "batch-schedule"),
    ("batch-runs", BatchRunViewSet, "batch-run"),
)
