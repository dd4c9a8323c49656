"""Benchmarks and configuration searches over HTTP: create, follow, cancel and compare them. Decides nothing: services
do."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.refusals import InvalidInput
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint, ConfigurationSearch
from models_registry.benchmarks.planning.configuration_search import Standing
from models_registry.benchmarks.planning.goodput import PointVerdict
from models_registry.benchmarks.planning.measurements import Aim, best_configuration
from models_registry.benchmarks.planning.workload import BenchmarkState, InvalidWorkload, parse_slo, parse_workload
from models_registry.benchmarks.selectors import (
    CandidateRow,
    benchmarks_described,
    benchmarks_of_use,
    candidate_rows,
    measured_of,
    searches_described,
)
from models_registry.benchmarks.services.benchmark import BenchmarkRequest, benchmark_cancel, benchmark_start
from models_registry.benchmarks.services.configuration_search import (
    MOST_HOURS,
    MOST_TRIALS,
    SearchRequest,
    search_cancel,
    search_start,
)
from models_registry.versions.planning.lifecycle import choices
from models_registry.versions.selectors import version_stated

WORKLOAD_HELP = "Workload: `1000+150`, `3000+200,prefix=512,groups=8`, `mooncake,longest=4096`, `azure`."
SLO_HELP = "Limits in milliseconds for the first token and for the mean time between tokens: `ttft=500,itl=50`."


class BenchmarkPointSerializer(serializers.ModelSerializer[BenchmarkPoint]):
    verdict = serializers.ChoiceField(choices=choices(PointVerdict))
    figures = serializers.DictField(help_text="Latencies in milliseconds by quantile, tokens, joules, US dollars.")

    class Meta:
        model = BenchmarkPoint
        fields = ["number", "rate", "verdict", "reason", "figures", "measured_at"]
        examples = {"figures": {"requests": 200, "ttft_p99_ms": 412.5, "itl_p99_ms": 39.1, "tokens_per_s": 462.6}}


class BenchmarkSerializer(serializers.ModelSerializer[Benchmark]):
    version = serializers.CharField(source="version.reference", help_text="`model@version`")
    state = serializers.ChoiceField(choices=choices(BenchmarkState))
    tone = serializers.ChoiceField(choices=choices(Tone))
    key = serializers.CharField(help_text="Equal for benchmarks that measured the same; empty until it starts.")
    conditions = serializers.CharField(help_text="Equal for benchmarks that differ only in the version.")
    workload = serializers.CharField(help_text=WORKLOAD_HELP)
    slo = serializers.CharField(help_text=SLO_HELP)
    split = serializers.CharField(help_text="Number of cells per role: `1p+3d`. Empty: all cells are mixed.")
    statistics = serializers.DictField(help_text="Mean lengths of the workload, and the repeated share of its prompts.")
    progress = serializers.DictField(help_text="Progress of the current point.")
    goodput = serializers.FloatField(
        allow_null=True, help_text="Highest rate that met the objective, in requests per second."
    )
    broke_at = serializers.FloatField(allow_null=True, help_text="Lowest higher rate that missed the objective.")
    concurrency = serializers.FloatField(
        allow_null=True, help_text="Concurrent requests per answering cell at `goodput`."
    )
    watts = serializers.FloatField(help_text="Rated power of all its machines.")
    price_per_hour = serializers.FloatField(help_text="Price of all its machines, in US dollars.")
    points = BenchmarkPointSerializer(many=True, help_text="Measured rates, in ascending order.")

    class Meta:
        model = Benchmark
        fields = [
            "id", "version", "deployment", "region", "state", "tone", "reason", "key", "conditions", "version_digest",
            "instance_type", "fingerprint", "workload", "slo", "seed", "cells", "split", "chips", "watts",
            "price_per_hour", "statistics", "progress", "goodput", "broke_at", "concurrency", "points", "actor",
            "created_at", "started_at", "ended_at",
        ]  # fmt: skip
        examples = {
            "version": "smollm2@1",
            "conditions": "0c4de1b7a9f83512",
            "version_digest": "f1d2b7c9e0a34655",
            "split": "",
            "statistics": {
                "requests": 2000,
                "prompt_tokens_mean": 1000.0,
                "output_tokens_mean": 150.0,
                "repeated_share": 0.0,
            },
        }


class StartBenchmarkSerializer(StrictSerializer):
    version = serializers.CharField(max_length=200, help_text="`model@version`; the deployment must serve it.")
    deployment = serializers.CharField(max_length=96)
    region = serializers.CharField(max_length=64, required=False, allow_blank=True, default="")
    workload = serializers.CharField(max_length=200, help_text=WORKLOAD_HELP)
    slo = serializers.CharField(max_length=80, help_text=SLO_HELP)
    seed = serializers.IntegerField(min_value=0, max_value=2**31 - 1, required=False, default=0)
    rules = serializers.DictField(
        required=False, default=dict, help_text="Changes to the default length of points: `min_s`, `min_requests`…"
    )
    first_rate = serializers.FloatField(
        min_value=0.001,
        max_value=4096,
        required=False,
        allow_null=True,
        default=None,
        help_text="Rate to measure first.",
    )
    beside_traffic = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Measure even though the cells serve other requests, which become slower.",
    )

    class Meta:
        examples = {"version": "smollm2@1", "region": "us-east-1"}


class HistogramSerializer(serializers.Serializer[Any]):
    rate = serializers.FloatField()
    histograms = serializers.DictField(
        help_text="`ttft`, `gap`, `e2e`: bucket -> requests. Bucket n ends at 0.1 ms times 2^(n/8)."
    )

    class Meta:
        examples = {"histograms": {"ttft": {"88": 140, "89": 60}, "gap": {"64": 29800}, "e2e": {"125": 200}}}


class HistogramsSerializer(serializers.Serializer[Any]):
    points = HistogramSerializer(many=True, help_text="Measured rates, in ascending order.")


class BestSerializer(serializers.Serializer[Any]):
    version = serializers.CharField(help_text="`model@version`")
    instance_type = serializers.CharField()
    split = serializers.CharField(help_text="Number of cells per role; empty: all cells are mixed.")
    benchmark = serializers.IntegerField()
    goodput_per_chip = serializers.FloatField()
    tokens_per_s_per_chip = serializers.FloatField()
    tokens_per_s_per_user = serializers.FloatField(allow_null=True)
    dollars_per_mtoken = serializers.FloatField(allow_null=True)
    joules_per_token = serializers.FloatField(allow_null=True)
    reason = serializers.CharField()

    class Meta:
        examples = {"version": "smollm2@1", "split": ""}


class BestAnswerSerializer(serializers.Serializer[Any]):
    best = BestSerializer(allow_null=True, help_text="Null if nothing was measured with this aim.")


class BenchmarkFilter(filters.FilterSet):
    version = filters.CharFilter(method="of_version", help_text="`model@version`")
    deployment = filters.CharFilter()
    state = filters.ChoiceFilter(choices=choices(BenchmarkState))
    key = filters.CharFilter()
    conditions = filters.CharFilter()

    def of_version(self, rows: QuerySet[Benchmark], name: str, value: str) -> QuerySet[Benchmark]:
        model, _, version = value.partition("@")
        return rows.filter(version__model_id=model, version__version=version)


class BenchmarkViewSet(ReadOnlyModelViewSet[Benchmark]):
    """Measures goodput: the highest rate at which enough requests meet an objective."""

    serializer_class = BenchmarkSerializer
    filterset_class = BenchmarkFilter
    page_order = "id"
    ordering_fields = ("id", "created_at", "goodput")
    watch_kind = "benchmark"
    measured = frozenset({"progress"})
    columns = (
        "ID, VERSION, TYPE=instance_type, STATE, WORKLOAD, SLO, GOODPUT/S=goodput, BROKE AT, "
        "CONCURRENCY=concurrency, AGE=created_at:age"
    )

    def get_queryset(self) -> QuerySet[Benchmark]:
        return benchmarks_described()

    def deployment_of(self, benchmark: Benchmark) -> str:
        return benchmark.deployment

    def requested_deployment(self, request: Request) -> str:
        return str(request.data.get("deployment", "")) if isinstance(request.data, dict) else ""

    @extend_schema(request=StartBenchmarkSerializer)
    def create(self, request: Request) -> Response:
        """Measure the goodput of a deployment's cells. The load grows until they exceed the objective, so they should
        have no other users. The benchmark runs after this response. 409 if too many are waiting."""
        fields = body_of(request, StartBenchmarkSerializer)
        version = version_stated(fields.pop("version"), field="version")
        row = benchmark_start(BenchmarkRequest(version, **fields), actor=actor_of(request), now=clock.now())
        return self._answer(row.pk)

    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, id: str) -> Response:
        """Cancel a benchmark that waits or runs; measured points are kept. 409 if it has ended."""
        return self.act_on_object(request, benchmark_cancel, "benchmark_id", accepted=None)

    @extend_schema(responses={200: HistogramsSerializer})
    @action(detail=True, methods=["get"], pagination_class=None, filterset_class=None)
    def histograms(self, request: Request, id: str) -> Response:
        """Number of requests by duration bucket, for each rate."""
        points = BenchmarkPoint.objects.filter(benchmark=self.get_object()).order_by("rate")
        return Response(HistogramsSerializer({"points": points}).data)

    @extend_schema(
        parameters=[
            OpenApiParameter("workload", str, required=True, description=WORKLOAD_HELP),
            OpenApiParameter("slo", str, required=True, description=SLO_HELP),
            OpenApiParameter("instance_type", str, description="Only this instance type."),
            OpenApiParameter("aim", str, enum=[aim.value for aim in Aim], description="Default: goodput."),
        ],
        responses={200: BestAnswerSerializer},
    )
    @action(detail=False, methods=["get"], pagination_class=None, filterset_class=None)
    def best(self, request: Request) -> Response:
        """The best measured version and instance type for a use, with the reason; empty if none was measured."""
        asked = request.query_params
        try:
            workload = parse_workload(asked.get("workload", "")).text
            slo = parse_slo(asked.get("slo", "")).text
        except InvalidWorkload as wrong:
            field = "slo" if str(wrong).startswith("slo") else "workload"
            raise InvalidInput(field=field, rule="readable", message=str(wrong)) from None
        if (aim := asked.get("aim", Aim.GOODPUT.value)) not in set(Aim):
            raise InvalidInput(
                field="aim", rule="choice", message=f"aim is {aim[:40]!r}; it must be one of {', '.join(Aim)}"
            )
        rows = benchmarks_of_use(workload, slo, asked.get("instance_type", ""))
        best = best_configuration(filter(None, map(measured_of, rows)), Aim(aim))
        return Response(BestAnswerSerializer({"best": _best(best) if best else None}).data)

    def _answer(self, benchmark_id: int) -> Response:
        return Response(self.get_serializer(self.get_queryset().get(pk=benchmark_id)).data)


def _best(best: Any) -> dict[str, Any]:
    chosen = best.chosen
    names = ("version", "instance_type", "split", "benchmark", "goodput_per_chip", "tokens_per_s_per_chip",
             "tokens_per_s_per_user", "dollars_per_mtoken", "joules_per_token")  # fmt: skip
    return {**{name: getattr(chosen, name) for name in names}, "reason": best.reason}


VARIED_HELP = (
    "Name -> values: `engine_options.NAME` (null: left out), `parallelism.DEGREE`, `max_concurrency`, "
    "`speculation`, `quantization`, `roles`, `cells` (as in a region of a deployment: `4`, "
    '`{"prefill": 1, "decode": 3}`; at most the deployment\'s own number). Every combination is one '
    "configuration."
)


class ConfigurationSerializer(serializers.Serializer[CandidateRow]):
    number = serializers.IntegerField(source="candidate.number")
    choice = serializers.SerializerMethodField(help_text="Name -> value of what this configuration changes.")
    version = serializers.SerializerMethodField(help_text="`model@version` of its draft; null: it has none.")
    standing = serializers.ChoiceField(choices=choices(Standing))
    reason = serializers.CharField()
    predicted = serializers.FloatField(allow_null=True, help_text="Requests per second and chip.")
    scores = serializers.SerializerMethodField(help_text="Share of the point length -> requests per second and chip.")
    benchmarks = serializers.SerializerMethodField(help_text="Its benchmarks.")

    class Meta:
        examples = {
            "choice": {"engine_options.max_num_seqs": 32, "parallelism.tp": 1},
            "version": "smollm2@1-s3-2",
            "scores": {"25%": 3.118, "50%": 3.051, "100%": 3.051},
        }

    @extend_schema_field(serializers.DictField())
    def get_choice(self, row: CandidateRow) -> dict[str, Any]:
        return dict(row.candidate.choice)

    def get_version(self, row: CandidateRow) -> str | None:
        return row.candidate.version.reference if row.candidate.version else None

    @extend_schema_field(serializers.DictField(child=serializers.FloatField()))
    def get_scores(self, row: CandidateRow) -> dict[str, float]:
        return {f"{fidelity:.0%}": score for fidelity, score in row.scores.items()}

    @extend_schema_field(serializers.ListField(child=serializers.IntegerField()))
    def get_benchmarks(self, row: CandidateRow) -> list[int]:
        return [trial.benchmark_id for trial in row.candidate.trials.all() if trial.benchmark_id]


class ConfigurationSearchSerializer(serializers.ModelSerializer[ConfigurationSearch]):
    version = serializers.CharField(
        source="version.reference", help_text="`model@version` that the search starts from."
    )
    state = serializers.ChoiceField(choices=choices(BenchmarkState))
    tone = serializers.ChoiceField(choices=choices(Tone))
    reason = serializers.CharField(help_text="Progress, or the result.")
    workload = serializers.CharField(help_text=WORKLOAD_HELP)
    slo = serializers.CharField(help_text=SLO_HELP)
    varied = serializers.DictField(help_text=VARIED_HELP)
    best = serializers.SerializerMethodField(help_text="`model@version` of the best configuration.")
    configurations = serializers.SerializerMethodField(help_text="Best first.")

    class Meta:
        model = ConfigurationSearch
        fields = [
            "id", "version", "deployment", "region", "instance_type", "state", "tone", "reason", "workload", "slo",
            "seed", "varied", "most_trials", "most_hours", "best", "configurations", "actor", "created_at", "ended_at",
        ]  # fmt: skip
        examples = {
            "version": "smollm2@1",
            "varied": {"engine_options.max_num_seqs": [16, 32, 64], "parallelism.tp": [1, 2]},
            "best": "smollm2@1-s3-2",
        }

    def get_best(self, row: ConfigurationSearch) -> str | None:
        return row.best.version.reference if row.best and row.best.version else None

    @extend_schema_field(ConfigurationSerializer(many=True))
    def get_configurations(self, row: ConfigurationSearch) -> list[dict[str, Any]]:
        return [dict(ConfigurationSerializer(one).data) for one in candidate_rows(row)]


class StartSearchSerializer(StrictSerializer):
    version = serializers.CharField(max_length=200, help_text="`model@version`; the deployment must serve it.")
    deployment = serializers.CharField(
        max_length=96, help_text="In one region and without other users: it is rolled out repeatedly."
    )
    region = serializers.CharField(max_length=64, required=False, allow_blank=True, default="")
    varied = serializers.DictField(help_text=VARIED_HELP)
    workload = serializers.CharField(max_length=200, help_text=WORKLOAD_HELP)
    slo = serializers.CharField(max_length=80, help_text=SLO_HELP)
    seed = serializers.IntegerField(min_value=0, max_value=2**31 - 1, required=False, default=0)
    rules = serializers.DictField(required=False, default=dict, help_text="Length of full points.")
    most_trials = serializers.IntegerField(min_value=1, max_value=MOST_TRIALS, required=False, default=40)
    most_hours = serializers.FloatField(min_value=0.01, max_value=MOST_HOURS, required=False, default=12.0)

    class Meta:
        examples = {
            "version": "smollm2@1",
            "varied": {"engine_options.max_num_seqs": [16, 32, 64], "parallelism.tp": [1, 2]},
        }


class ConfigurationSearchFilter(filters.FilterSet):
    deployment = filters.CharFilter()
    state = filters.ChoiceFilter(choices=choices(BenchmarkState))


class ConfigurationSearchViewSet(ReadOnlyModelViewSet[ConfigurationSearch]):
    """Searches for the configuration of a version with the highest goodput per chip."""

    serializer_class = ConfigurationSearchSerializer
    filterset_class = ConfigurationSearchFilter
    page_order = "id"
    ordering_fields = ("id", "created_at")
    watch_kind = "configuration-search"
    aliases = ("searches",)
    columns = "ID, AROUND=version, DEPLOYMENT, STATE, WORKLOAD, SLO, BEST, REASON, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[ConfigurationSearch]:
        return searches_described()

    @extend_schema(request=StartSearchSerializer)
    def create(self, request: Request) -> Response:
        """Search around the version that a deployment serves: drafts are created, validated, rolled out and measured
        one by one, and finally the original version is rolled out again. 409 while another search of this deployment
        runs."""
        fields = body_of(request, StartSearchSerializer)
        version = version_stated(fields.pop("version"), field="version")
        row = search_start(SearchRequest(version, **fields), actor=actor_of(request), now=clock.now())
        return self._answer(row.pk)

    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, id: str) -> Response:
        """Stop measuring and roll back to the original version. 409 if it has ended."""
        return self.act_on_object(request, search_cancel, "search_id", accepted=None)

    def _answer(self, search_id: int) -> Response:
        return Response(self.get_serializer(self.get_queryset().get(pk=search_id)).data)


ROUTES = (
    ("benchmarks", BenchmarkViewSet, "benchmark"),
    ("configuration-searches", ConfigurationSearchViewSet, "configuration-search"),
)
