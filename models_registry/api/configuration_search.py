"""Searches over configurations over HTTP: ask for one, follow it, cancel it. Decides nothing; services do."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone
from models_registry.api.benchmark import SLO_HELP, WORKLOAD_HELP
from models_registry.models import ConfigurationSearch
from models_registry.planning.benchmark import BenchmarkState
from models_registry.planning.configuration_search import Standing
from models_registry.planning.lifecycle import choices
from models_registry.selectors.configuration_search import CandidateRow, candidate_rows, searches_described
from models_registry.selectors.model import version_stated
from models_registry.services.configuration_search import (
    MOST_HOURS,
    MOST_TRIALS,
    SearchRequest,
    search_cancel,
    search_start,
)

VARIED_HELP = (
    "Name -> values: `engine_options.NAME` (null: left out), `parallelism.DEGREE`, `max_concurrency`, `speculation`, "
    '`quantization`, `roles`, `cells` (as a region of a deployment states them: `4`, `{"prefill": 1, "decode": 3}`; '
    "not more than it has). Every combination is one configuration."
)


class ConfigurationSerializer(serializers.Serializer[CandidateRow]):
    number = serializers.IntegerField(source="candidate.number")
    choice = serializers.SerializerMethodField(help_text="What it differs in, by name.")
    version = serializers.SerializerMethodField(help_text="`model@version`; null: none was drafted.")
    standing = serializers.ChoiceField(choices=choices(Standing))
    reason = serializers.CharField()
    predicted = serializers.FloatField(allow_null=True, help_text="Requests a second and chip.")
    scores = serializers.SerializerMethodField(help_text="Share of a point's length -> requests a second and chip.")
    benchmarks = serializers.SerializerMethodField(help_text="What was measured of it.")

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
    version = serializers.CharField(source="version.reference", help_text="`model@version` that is searched around.")
    state = serializers.ChoiceField(choices=choices(BenchmarkState))
    tone = serializers.ChoiceField(choices=choices(Tone))
    reason = serializers.CharField(help_text="What it does, or what was found.")
    workload = serializers.CharField(help_text=WORKLOAD_HELP)
    slo = serializers.CharField(help_text=SLO_HELP)
    varied = serializers.DictField(help_text=VARIED_HELP)
    best = serializers.SerializerMethodField(help_text="`model@version` of the configuration that was found.")
    configurations = serializers.SerializerMethodField(help_text="The best first.")

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
    version = serializers.CharField(max_length=200, help_text="`model@version`, which the deployment must serve.")
    deployment = serializers.CharField(
        max_length=96, help_text="Of one region, which nobody else needs meanwhile: it is rolled out again and again."
    )
    region = serializers.CharField(max_length=64, required=False, allow_blank=True, default="")
    varied = serializers.DictField(help_text=VARIED_HELP)
    workload = serializers.CharField(max_length=200, help_text=WORKLOAD_HELP)
    slo = serializers.CharField(max_length=80, help_text=SLO_HELP)
    seed = serializers.IntegerField(min_value=0, max_value=2**31 - 1, required=False, default=0)
    rules = serializers.DictField(required=False, default=dict, help_text="Of points at their whole length.")
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

    class Meta:
        model = ConfigurationSearch
        fields: list[str] = []


class ConfigurationSearchViewSet(ReadOnlyModelViewSet[ConfigurationSearch]):
    """Searches for the configuration of a version that carries most per chip within an objective."""

    serializer_class = ConfigurationSearchSerializer
    filterset_class = ConfigurationSearchFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    ordering_fields = ("id", "created_at")
    watch_kind = "configuration-search"
    aliases = ("searches",)
    columns = "ID, AROUND=version, DEPLOYMENT, STATE, WORKLOAD, SLO, BEST, REASON, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[ConfigurationSearch]:
        return searches_described()

    @extend_schema(
        operation_id="configuration_searches_create",
        request=StartSearchSerializer,
        responses={200: ConfigurationSearchSerializer},
    )
    def create(self, request: Request) -> Response:
        """Search around what a deployment serves: versions are drafted, validated, rolled out to it and measured, one
        after the other; at the end it serves again what it did. 409 while another search of it runs."""
        body = StartSearchSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        fields = dict(body.validated_data)
        version = version_stated(fields.pop("version"), field="version")
        row = search_start(SearchRequest(version, **fields), actor=actor_of(request), now=clock.now())
        return self._answer(row.pk)

    @extend_schema(
        operation_id="configuration_searches_cancel", request=None, responses={200: ConfigurationSearchSerializer}
    )
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, id: str) -> Response:
        """Measure nothing more, and let the deployment serve what it did. 409 if it has ended."""
        row = search_cancel(search_id=self.get_object().pk, actor=actor_of(request), now=clock.now())
        return self._answer(row.pk)

    def _answer(self, search_id: int) -> Response:
        return Response(self.get_serializer(self.get_queryset().get(pk=search_id)).data)
