"""Sampled requests over HTTP, and what slow ones have in common. Read only."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.request_messages import SampleKind
from fleet.load.api import RangeOptionsSerializer
from fleet.reconcile.planning.states import choices
from fleet.requests.models import RequestSample
from fleet.requests.planner import FAILED, Comparison, Finding, Stage, compare_requests
from fleet.requests.selectors import failed_requests, requests_between, requests_compared
from kernel import clock
from kernel.rest.serializers import validated
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.time_ranges import OF_LOAD, parse_range
from kernel.tones import Tone


class RequestSerializer(serializers.ModelSerializer[RequestSample]):
    outcome = serializers.CharField(read_only=True, help_text="Status, error code and whether another cell was tried.")
    tone = serializers.ChoiceField(choices=choices(Tone), read_only=True)

    class Meta:
        model = RequestSample
        fields = [
            "id", "request", "at", "kind", "status", "reason", "outcome", "tone", "cell", "generation", "deployment",
            "region", "ingress", "tenant", "key", "serving_class", "adapter", "path", "prefix", "is_stream",
            "is_handed_over", "is_handed_back", "in_flight", "prompt_tokens", "cached_tokens", "completion_tokens",
            "ingress_ms", "queue_ms", "first_ms", "total_ms", "trace",
        ]  # fmt: skip
        examples = {
            "request": "9f1c0de4a2b34c5d8e7f60718293a4b5",
            "status": 200,
            "outcome": "200",
            "reason": "",
            "prefix": "c3ab8ff13720",
        }


class RequestFilter(filters.FilterSet):
    request = filters.CharFilter(lookup_expr="startswith", help_text="The beginning of a request id.")
    kind = filters.ChoiceFilter(choices=choices(SampleKind))
    failed = filters.BooleanFilter(method="by_failure", help_text="Of kind `error` or `refused`, or of another kind.")
    cell = filters.CharFilter()
    deployment = filters.CharFilter()
    region = filters.CharFilter()
    tenant = filters.CharFilter()
    key = filters.CharFilter(help_text="Prefix of the application key.")
    trace = filters.CharFilter(help_text="Id of a client's trace.")
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At or after.")
    until = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt", help_text="Before.")

    def by_failure(self, found: QuerySet[RequestSample], _name: str, value: bool) -> QuerySet[RequestSample]:
        return failed_requests(found) if value else found.exclude(kind__in=FAILED)


class FindingSerializer(serializers.Serializer[Finding]):
    """A feature that is more frequent among slow requests than chance explains."""

    text = serializers.CharField()
    column = serializers.CharField(help_text="The field of requests that it is about.")
    value = serializers.CharField(help_text="Its value, or its threshold.")
    hits = serializers.IntegerField(help_text="Slow requests that have it.")
    other_hits = serializers.IntegerField(help_text="Ordinary requests that have it.")
    support = serializers.FloatField(help_text="Share of the slow requests.")
    lift = serializers.FloatField(help_text="How many times more frequent it is than among ordinary requests.")
    chance = serializers.FloatField(help_text="p-value, corrected for the number of tested features.")
    also = serializers.ListField(child=serializers.CharField(), help_text="Features of the same requests.")


class StageSerializer(serializers.Serializer[Stage]):
    """Medians in milliseconds; null: unknown."""

    name = serializers.CharField()
    slow_ms = serializers.FloatField(allow_null=True)
    other_ms = serializers.FloatField(allow_null=True)


class ComparisonSerializer(serializers.Serializer[Comparison]):
    """Slow requests next to ordinary ones. A request is slow above twice the median of its place."""

    verdict = serializers.CharField()
    slow = serializers.IntegerField(help_text="Slow requests of the samples.")
    others = serializers.IntegerField(help_text="Ordinary requests of the samples.")
    stream_ms = serializers.FloatField(allow_null=True, help_text="A stream is slow above; null: too few samples.")
    whole_ms = serializers.FloatField(allow_null=True, help_text="The same of whole answers.")
    findings = FindingSerializer(many=True)
    stages = StageSerializer(many=True)


class ComparisonOptionsSerializer(RangeOptionsSerializer):
    """A cell, a deployment, or a deployment in a region; samples of answered requests are kept for a day."""

    cell = serializers.CharField(default="")
    deployment = serializers.CharField(default="")
    region = serializers.CharField(default="")


class RequestViewSet(ReadOnlyModelViewSet[RequestSample]):
    """Sampled requests, newest first: a uniform sample, the slowest and the failed ones of each cell and half minute,
    and those that ingresses answered with an error. They have no text of requests. They are kept for a day, failed ones
    for a week, or for less time at the limits of their number."""

    queryset = RequestSample.objects.all()
    serializer_class = RequestSerializer
    filterset_class = RequestFilter
    page_order = "-id"
    ordering_fields = ("id", "at", "first_ms", "total_ms", "prompt_tokens")
    aliases = ("req",)
    columns = (
        "REQUEST, AGO=at:age, OUTCOME, TENANT=tenant:or=-, CELL, PROMPT=prompt_tokens:number, "
        "OUTPUT=completion_tokens:number, FIRST_MS=first_ms:number, TOTAL_MS=total_ms:number"
    )

    @extend_schema(parameters=[ComparisonOptionsSerializer], responses={200: ComparisonSerializer})
    @action(detail=False, methods=["get"], filter_backends=[], pagination_class=None)
    def comparison(self, request: Request) -> Response:
        """Compares the slow requests of a place with its ordinary ones, from the newest samples."""
        given: dict[str, Any] = validated(ComparisonOptionsSerializer, request.query_params.dict())
        names = {name: given[name] for name in ("cell", "deployment", "region")}
        span = parse_range(name=given["range"], since=given["from"], until=given["to"], ranges=OF_LOAD, now=clock.now())
        found = compare_requests(requests_compared(requests_between(span, **names)))
        return Response(ComparisonSerializer(found).data)


ROUTES = (("requests", RequestViewSet, "request"),)
