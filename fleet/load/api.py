"""Load over time of a cell, deployment or region over HTTP. Read only."""

from dataclasses import asdict, fields
from datetime import timedelta
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.load.selectors import NodePoint, load_series, node_series, step_of
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


USE_HELP = {
    "cpu_percent": "CPUs that the node may use.",
    "memory_percent": "Memory of the machine.",
    "disk_percent": "File system with the node's files.",
    "utilisation_percent": "Mean of the accelerators.",
    "device_memory_percent": "Memory of the accelerators.",
    "clock_percent": "Lowest clock of an accelerator, of its maximum.",
    "temperature_c": "Hottest accelerator.",
    "power_watts": "Sum of the accelerators.",
    "network_received_per_s": "Bytes.",
    "network_sent_per_s": "Bytes.",
    "disk_read_per_s": "Bytes.",
    "disk_written_per_s": "Bytes.",
    "ecc_errors": "New ECC errors of the accelerators.",
    "link_errors": "New errors of NVLink, PCIe and EFA.",
}


class UsePointSerializer(serializers.Serializer[Any]):
    """One window; null: not reported."""

    at = serializers.DateTimeField(help_text="Start of the window.")

    def get_fields(self) -> dict[str, Any]:
        names = (field.name for field in fields(NodePoint))
        return super().get_fields() | {
            name: serializers.FloatField(allow_null=True, help_text=USE_HELP[name]) for name in names
        }


class UseSeriesSerializer(serializers.Serializer[Any]):
    """Windows of `step_s` seconds since `start`, oldest first; windows without reports are missing."""

    range = serializers.CharField(help_text="Empty between two moments.")
    start = serializers.DateTimeField()
    step_s = serializers.IntegerField()
    points = UsePointSerializer(many=True)

    class Meta:
        examples = {"range": "1h"}


class WithUse:
    """Adds the action `use` to a view set, which names the subject of a row in `use_subject`."""

    def use_subject(self, row: Any) -> str:
        raise NotImplementedError

    @extend_schema(parameters=[RangeOptionsSerializer], responses={200: UseSeriesSerializer})
    @action(detail=True, methods=["get"], filter_backends=[])
    def use(self, request: Request, **_: str) -> Response:
        """Use of machines and accelerators over time, in windows. Of several nodes: means, the hottest accelerator and
        the total power."""
        view: Any = self
        subject = self.use_subject(view.get_object())
        given, now = validated(RangeOptionsSerializer, request.query_params.dict()), clock.now()
        span = parse_range(name=given["range"], since=given["from"], until=given["to"], ranges=OF_LOAD, now=now)
        series = node_series([subject], span, now)[subject]
        step = timedelta(seconds=series.step_s)
        points = [{"at": series.start + i * step, **asdict(point)} for i, point in enumerate(series.points) if point]
        shown = {"range": span.name, "start": series.start, "step_s": series.step_s, "points": points}
        return Response(UseSeriesSerializer(shown).data)
