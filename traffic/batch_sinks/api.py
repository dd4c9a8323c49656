"""Sinks of batches for admins, and deliveries to them. Parses, calls one service, renders; decides nothing."""

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
from kernel.access import Role
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin, ReadOnlyModelViewSet
from kernel.tones import Tone
from traffic.batch_sinks.models import SETTABLE, BatchDelivery, BatchSink
from traffic.batch_sinks.planner import DeliveryState, SinkKind
from traffic.batch_sinks.services.sinks import (
    batch_delivery_retry,
    batch_sink_change,
    batch_sink_create,
    batch_sink_delete,
)

TENANT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"


class BatchSinkSerializer(RecordSerializer[BatchSink]):
    has_password = serializers.BooleanField(source="sealed_password", help_text="The password itself is not shown.")

    class Meta:
        model = BatchSink
        fields = ["name", "tenant", *SETTABLE, "has_password", "actor", "created_at", "changed_at"]
        examples = {
            "name": "answers",
            "tenant": "acme",
            "kind": "valkey",
            "url": "valkeys://answers.acme.example:6379/0",
            "key_template": "answers:{custom_id}",
            "username": "switchyard",
            "ca_pem": "",
        }


class ChangeBatchSinkSerializer(ColumnsSerializer):
    tenant = serializers.RegexField(TENANT, required=False, help_text="It never changes.")
    password = serializers.CharField(
        max_length=1024,
        required=False,
        allow_blank=True,
        trim_whitespace=False,
        help_text="Stored encrypted and never shown. Another address or user needs it again.",
    )

    class Meta:
        model = BatchSink
        columns = SETTABLE

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        for field in fields.values():
            field.required = False
        return {"tenant": fields.pop("tenant"), **fields}


class CreateBatchSinkSerializer(ChangeBatchSinkSerializer):
    name = serializers.SlugField(max_length=64)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        for name in ("name", "tenant", "kind", "url"):
            fields[name].required = True
        return {"name": fields.pop("name"), **fields}


class BatchDeliverySerializer(RecordSerializer[BatchDelivery]):
    batch = serializers.CharField(
        source="batch_id", allow_null=True, help_text="Null for a group of near-real-time requests."
    )
    sink = serializers.CharField(source="sink_id")
    tone = serializers.ChoiceField(choices=choices(Tone))
    dead_letters = serializers.ListField(
        child=serializers.DictField(), help_text="The first lines that no attempt can deliver, with reasons."
    )

    class Meta:
        model = BatchDelivery
        fields = [
            "id", "batch", "sink", "state", "tone", "reason", "lines", "dead", "dead_letters", "attempts", "due_at",
            "ended_at",
        ]  # fmt: skip
        examples = {"batch": "batch_6f1d0f0d2c3b4a5968778695a4b3c2d1", "sink": "answers"}


class BatchSinkFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    kind = filters.ChoiceFilter(choices=choices(SinkKind))


class BatchSinkViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[BatchSink]):
    """Destinations of results of a tenant's batches and near-real-time requests: prefixes of S3, and keys of Valkey or
    Redis."""

    queryset = BatchSink.objects.all()
    serializer_class = BatchSinkSerializer
    filterset_class = BatchSinkFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w]+"
    page_order = "name"
    needs = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("name", "tenant", "created_at")
    columns = "NAME, TENANT, KIND, URL, KEY=key_template, TTL=ttl_s"

    @extend_schema(request=CreateBatchSinkSerializer)
    def create(self, request: Request) -> Response:
        """Create a sink. Returns 409 if the name is taken."""
        columns = body_of(request, CreateBatchSinkSerializer)
        row = batch_sink_create(actor=actor_of(request), now=clock.now(), **columns)
        return Response(BatchSinkSerializer(row).data)

    @extend_schema(request=ChangeBatchSinkSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the given fields."""
        return self.act_on_object(request, batch_sink_change, "name", ChangeBatchSinkSerializer)

    def destroy(self, request: Request, name: str) -> Response:
        """Delete a sink, and return it. Delivered results stay. Returns 409 while deliveries are pending."""
        return self.remove_object(request, batch_sink_delete, "name")


class BatchDeliveryFilter(filters.FilterSet):
    batch = filters.CharFilter()
    sink = filters.CharFilter()
    state = filters.ChoiceFilter(choices=choices(DeliveryState))


class BatchDeliveryViewSet(ReadOnlyModelViewSet[BatchDelivery]):
    """Deliveries to sinks, newest first: of a batch each, or of a group of near-real-time requests."""

    queryset = BatchDelivery.objects.all()
    serializer_class = BatchDeliverySerializer
    filterset_class = BatchDeliveryFilter
    lookup_value_regex = r"[0-9]+"
    page_order = "-id"
    ordering_fields = ("id", "state", "due_at")
    columns = "ID, BATCH, SINK, STATE, LINES, DEAD, REASON"

    @extend_schema(request=None)
    @action(detail=True, methods=["post"])
    def retry(self, request: Request, id: str) -> Response:
        """Continue a failed delivery where it ended. Returns 409 if it has not failed."""
        return self.act_on_object(request, batch_delivery_retry, "delivery_id", None)


ROUTES = (
    ("batch-sinks", BatchSinkViewSet, "batch-sink"),
    ("batch-deliveries", BatchDeliveryViewSet, "batch-delivery"),
)
