"""Load over time of a cell, deployment or region over HTTP. Read only."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.load.selectors import load_series, step_of
from kernel import clock
from kernel.rest.serializers import StrictSerializer, validated
from kernel.time_ranges import OF_LOAD, parse_range


class PointSerializer(serializers.Serializer[Any]):
    """One window; latencies and shares are null without requests."""

    at = serializers.DateTimeField(help_text="Start of the window.")
    requests_per_s = serializers.FloatField()
    errors_per_s = serializers.FloatField()
    errors_percent = serializers.FloatField(allow_null=True)
    cells = serializers.FloatField(help_text="Mean number of cells that reported.")
    in_flight = serializers.FloatField()
    queued = serializers.FloatField()
    tokens_per_s = serializers.FloatField(help_text="Generated tokens.")
    prompt_tokens_per_s = serializers.FloatField(help_text="Prompt tokens, counted at the end of their requests.")
    preemptions_per_s = serializers.FloatField(help_text="Sequences that left an engine's batch before their end.")
    ttft_p50_ms = serializers.FloatField(allow_null=True)
    ttft_p95_ms = serializers.FloatField(allow_null=True)
    itl_p50_ms = serializers.FloatField(allow_null=True)
    itl_p95_ms = serializers.FloatField(allow_null=True)
    ttft_p99_ms = serializers.FloatField(allow_null=True)
    running = serializers.FloatField(allow_null=True, help_text="Sequences in engines' batches; null: not reported.")
    waiting = serializers.FloatField(allow_null=True, help_text="Requests in engines' queues.")
    kv_percent = serializers.FloatField(allow_null=True, help_text="KV-cache use, mean of the cells.")
    cache_hit_percent = serializers.FloatField(allow_null=True, help_text="Prompt tokens found in prefix caches.")
    step_ms = serializers.FloatField(allow_null=True, help_text="Mean time of an engine step.")


class LoadSeriesSerializer(serializers.Serializer[Any]):
    """Windows of `step_s` seconds since `start`, oldest first; windows without samples are missing."""

    range = serializers.CharField(help_text="Empty between two moments.")
    start = serializers.DateTimeField()
    step_s = serializers.IntegerField()
    points = PointSerializer(many=True)

    class Meta:
        examples = {"range": "1h"}


class RangeOptionsSerializer(StrictSerializer):
    """Either `range`, or `from` and `to`. The step of the windows follows from the range."""

    range = serializers.ChoiceField(choices=[(name, name) for name in OF_LOAD.names], default=OF_LOAD.default)
    to = serializers.CharField(default="", help_text="End, such as 2026-11-30T14:00Z. Default: now.")

    def get_fields(self) -> dict[str, Any]:
        start = serializers.CharField(default="", help_text="Start, such as 2026-11-30T13:00Z. History: 14 days.")
        return {**super().get_fields(), "from": start}


class WithLoad:
    """Adds the action `load` to a view set, which names the subject of a row in `load_subject`."""

    def load_subject(self, row: Any) -> str:
        raise NotImplementedError

    @extend_schema(
        parameters=[RangeOptionsSerializer],
        responses={200: LoadSeriesSerializer},
    )
    @action(detail=True, methods=["get"], filter_backends=[])
    def load(self, request: Request, **_: str) -> Response:
        """Load over time, in windows: rates, requests in flight, and percentiles of latencies."""
        view: Any = self
        subject = self.load_subject(view.get_object())
        given, now = validated(RangeOptionsSerializer, request.query_params.dict()), clock.now()
        span = parse_range(name=given["range"], since=given["from"], until=given["to"], ranges=OF_LOAD, now=now)
        series = load_series([subject], span, step_of(span, now))[subject]
        step = timedelta(seconds=series.step_s)
        points = [{"at": series.start + i * step, **asdict(point)} for i, point in enumerate(series.points) if point]
        shown = {"range": span.name, "start": series.start, "step_s": series.step_s, "points": points}
        return Response(LoadSeriesSerializer(shown).data)
