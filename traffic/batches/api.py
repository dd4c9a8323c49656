"""OpenAI's Batch API under `/v1/batches` for applications, and batches of all tenants for operators, without their
content. Decides nothing; services do."""

from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import path
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from kernel.tones import Tone
from traffic.batches.models import Batch
from traffic.batches.planning.batch import BATCH_TONE, BatchState, batch_not_found, parse_new_batch
from traffic.batches.selectors import (
    BatchStanding,
    batch_json,
    batch_of,
    batch_standing,
    batches_described,
    batches_of,
    deliveries_of,
    tallies,
)
from traffic.batches.services.batch import batch_cancel, batch_create, batch_settings
from traffic.batches.services.for_operators import batch_cancel_for_operator
from traffic.tenants.api import application_view, list_json, list_query, list_rows, unknown_path
from traffic.tenants.planner import ApplicationRefused, json_object
from traffic.tenants.selectors import Application

APPLICATIONS = "applications' batches are counted as usage, by key; they change nothing that operators run"


@application_view("GET", "POST", audit_exempt_as=APPLICATIONS)
def batches(request: HttpRequest, application: Application) -> HttpResponseBase:
    """GET: the tenant's batches. POST: create one."""
    now = clock.now()
    if request.method == "POST":
        created = batch_create(
            application=application,
            asked=parse_new_batch(_json_payload(request)),
            region=request.headers.get("X-Switchyard-Region", ""),
            now=now,
            settings=batch_settings(),
        )
        return _batch_response(created)
    rows, has_more = list_rows(batches_of(application.tenant), list_query(request, usual=20, most=100))
    done, sinks = tallies(rows), deliveries_of(rows)
    shown = list_json(
        rows, lambda row: batch_json(row, done[row.id], now=now, deliveries=sinks[row.id]), has_more=has_more
    )
    return JsonResponse(shown)


@application_view("GET", audit_exempt_as=APPLICATIONS)
def detail(request: HttpRequest, application: Application, batch_id: str) -> HttpResponseBase:
    """GET: one batch."""
    batch = batch_of(application.tenant, batch_id)
    if batch is None:
        raise batch_not_found(batch_id)
    return _batch_response(batch)


@application_view("POST", audit_exempt_as=APPLICATIONS)
def cancel(request: HttpRequest, application: Application, batch_id: str) -> HttpResponseBase:
    """POST /v1/batches/ID/cancel."""
    return _batch_response(batch_cancel(application=application, batch_id=batch_id, now=clock.now()))


def _batch_response(batch: Batch) -> HttpResponseBase:
    deliveries = deliveries_of([batch])[batch.id]
    return JsonResponse(batch_json(batch, tallies([batch])[batch.id], now=clock.now(), deliveries=deliveries))


def _json_payload(request: HttpRequest) -> dict[str, Any]:
    try:
        return json_object(request.body)
    except RequestDataTooBig:
        raise ApplicationRefused(413, "request_too_large", "the request body is too long") from None


urlpatterns = [
    path("<str:batch_id>", detail, name="batch"),
    path("<str:batch_id>/cancel", cancel, name="batch-cancel"),
    path(
        "<path:rest>",
        unknown_path("/v1/batches, /v1/batches/ID and /v1/batches/ID/cancel", audit_exempt_as=APPLICATIONS),
        name="batch-unknown-path",
    ),
]


class BatchErrorSerializer(serializers.Serializer[dict[str, object]]):
    code = serializers.CharField()
    line = serializers.IntegerField(
        allow_null=True, help_text="Line of the input file, from 1; null for the whole file."
    )


class BatchSerializer(serializers.ModelSerializer[Batch]):
    region = serializers.CharField(source="region_id")
    models = serializers.CharField(source="model_names")
    lines_by_model = serializers.DictField(child=serializers.IntegerField())
    tone = serializers.SerializerMethodField()
    completed = serializers.SerializerMethodField(help_text="Completed lines.")
    failed = serializers.SerializerMethodField(help_text="Lines with an error.")
    lines_per_s = serializers.SerializerMethodField(help_text="Mean over its whole run; null before.")
    estimated_end_at = serializers.SerializerMethodField(help_text="Estimate at that rate; null unless in progress.")
    errors = BatchErrorSerializer(  # type: ignore[assignment]
        many=True, help_text="Errors of its input, or why every line failed."
    )

    class Meta:
        model = Batch
        fields = [
            "id", "tenant", "key", "region", "input_uri", "output_uri",
            "endpoint", "models", "lines_by_model", "state", "tone", "priority", "window", "lines",
            "completed", "failed", "lines_per_s", "estimated_end_at", "errors", "input_tokens", "output_tokens",
            "created_at", "in_progress_at", "finalizing_at", "expires_at",
            "at_risk_at", "raised_at", "cells_asked_at", "validated_lines",
        ]  # fmt: skip
        examples = {
            "id": "batch_6f1d0f0d2c3b4a5968778695a4b3c2d1",
            "input_uri": "",
            "output_uri": "s3://acme-batches/out",
            "endpoint": "/v1/chat/completions",
            "window": "24h",
        }

    @extend_schema_field(serializers.ChoiceField(choices=choices(Tone)))
    def get_tone(self, row: Batch) -> str:
        return BATCH_TONE[BatchState(row.state)].value

    def get_completed(self, row: Batch) -> int:
        return self._standing(row).completed

    def get_failed(self, row: Batch) -> int:
        return self._standing(row).failed

    def get_lines_per_s(self, row: Batch) -> float | None:
        return self._standing(row).lines_per_s

    @extend_schema_field(serializers.DateTimeField(allow_null=True))
    def get_estimated_end_at(self, row: Batch) -> object:
        end_at = self._standing(row).estimated_end_at
        return serializers.DateTimeField().to_representation(end_at) if end_at else None

    @staticmethod
    def _standing(row: Batch) -> BatchStanding:
        return batch_standing(row, clock.now())


class CancelBatchSerializer(StrictSerializer):
    why = serializers.CharField(max_length=200, help_text="For the timeline.")


class BatchFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    model = filters.CharFilter(field_name="lines_by_model", lookup_expr="has_key")
    state = filters.ChoiceFilter(choices=choices(BatchState))


class BatchViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Batch]):
    """Batches of all tenants. Applications use `/v1/batches` of an ingress."""

    serializer_class = BatchSerializer
    filterset_class = BatchFilter
    lookup_value_regex = r"[0-9a-z_]{1,64}"
    page_order = "-created_at"
    ordering_fields = ("id", "created_at", "expires_at", "tenant", "state")
    columns = (
        "ID, TENANT, MODELS, STATE, LINES, COMPLETED, FAILED, LINES/S=lines_per_s, ENDS ABOUT=estimated_end_at, "
        "AGE=created_at:age"
    )

    def get_queryset(self) -> QuerySet[Batch]:
        return batches_described()

    @extend_schema(request=CancelBatchSerializer)
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, id: str) -> Response:
        """Cancel a batch; its tenant can read the completed lines. Returns 409 if it has ended."""
        body = body_of(request, CancelBatchSerializer)
        row = self.get_object()
        batch_cancel_for_operator(batch_id=row.id, actor=actor_of(request), now=clock.now(), why=body["why"])
        return Response(BatchSerializer(self.get_object()).data)


ROUTES = (("batches", BatchViewSet, "batch"),)
