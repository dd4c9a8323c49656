"""Models and model versions over HTTP. Read only: a version never changes once it is in use."""

from typing import Any

from django.db.models import QuerySet
from django.http import Http404
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema_field, extend_schema_serializer
from rest_framework import serializers
from rest_framework.viewsets import ReadOnlyModelViewSet

from models_registry.api import examples
from models_registry.models import Model, ModelVersion, VersionState
from models_registry.selectors.model import models_described, version_by_reference
from models_registry.selectors.rendering import renderings


@extend_schema_serializer(examples=[OpenApiExample("model", examples.MODEL, response_only=True)])
class ModelSerializer(serializers.ModelSerializer[Model]):
    versions = serializers.SerializerMethodField(help_text="`model@version`, newest first.")

    class Meta:
        model = Model
        fields = ["name", "description", "versions", "created_at"]

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_versions(self, model: Model) -> list[str]:
        return [version.reference for version in model.versions.all()]


class ModelFilter(filters.FilterSet):
    engine = filters.CharFilter(
        field_name="versions__engine", distinct=True, help_text="Has a version for this engine."
    )

    class Meta:
        model = Model
        fields: list[str] = []


class ModelViewSet(ReadOnlyModelViewSet[Model]):
    """What answers prompts, under the name that applications ask for."""

    serializer_class = ModelSerializer
    filterset_class = ModelFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"

    def get_queryset(self) -> QuerySet[Model]:
        return models_described()


class GoldenPromptSerializer(serializers.Serializer[Any]):
    prompt = serializers.CharField()
    expect = serializers.CharField()


class DegreesSerializer(serializers.Serializer[Any]):
    nodes = serializers.IntegerField()
    tp = serializers.IntegerField(help_text="Tensor-parallel ranks of the whole cell.")
    cp = serializers.IntegerField(help_text="Context parallelism of prefill, a share of `tp`.")
    dp = serializers.IntegerField(help_text="Data parallelism of decode, a share of `tp`.")
    pp = serializers.IntegerField(help_text="Pipeline stages.")


class RenderingSerializer(serializers.Serializer[Any]):
    instance_type = serializers.CharField()
    problem = serializers.CharField(help_text="Why it cannot be served there: field, value and rule. Empty if it can.")
    degrees = DegreesSerializer(allow_null=True, help_text="Stated ones, and the defaults of the instance type.")
    arguments = serializers.ListField(
        child=serializers.CharField(), help_text="The engine's arguments, as on every rank."
    )
    notes = serializers.ListField(child=serializers.CharField(), help_text="Allowed, but worth knowing.")


@extend_schema_serializer(examples=[OpenApiExample("model version", examples.VERSION, response_only=True)])
class ModelVersionSerializer(serializers.ModelSerializer[ModelVersion]):
    id = serializers.CharField(source="reference", help_text="`model@version`")
    model = serializers.CharField(source="model_id")
    ready_timeout_s = serializers.FloatField()
    parallelism = serializers.DictField(
        child=serializers.DictField(child=serializers.IntegerField()),
        help_text="Instance type -> nodes per cell, and degrees over the whole cell: `tp`, `cp`, `dp`, `pp`.",
    )
    engine_options = serializers.DictField(help_text="The engine's own options, by name.")
    engine_env = serializers.DictField(help_text="Environment variables of the engine.")
    golden_prompts = GoldenPromptSerializer(many=True)
    speculation = serializers.DictField(
        help_text="`method` (`ngram`, `draft_model`, `medusa`, `eagle`, `eagle3`) and its settings; empty: none."
    )
    quantization = serializers.DictField(help_text="How weights are quantized, in the engine's terms; empty: not.")
    renderings = serializers.SerializerMethodField(help_text="What a cell of it is on each instance type.")

    class Meta:
        model = ModelVersion
        fields = [
            "id", "model", "version", "state", "engine", "artifact_uri", "artifact_digest", "context_length",
            "max_concurrency", "ready_timeout_s", "attention_heads", "kv_heads", "layers", "parallelism", "speculation",
            "quantization", "engine_options", "engine_env", "golden_prompts", "renderings", "created_at",
        ]  # fmt: skip

    @extend_schema_field(RenderingSerializer(many=True))
    def get_renderings(self, version: ModelVersion) -> list[dict[str, Any]]:
        return list(RenderingSerializer(renderings(version), many=True).data)


class ModelVersionFilter(filters.FilterSet):
    model = filters.CharFilter(field_name="model_id")
    engine = filters.CharFilter()
    state = filters.MultipleChoiceFilter(choices=VersionState.choices, distinct=False, help_text="May be repeated.")

    class Meta:
        model = ModelVersion
        fields: list[str] = []


class ModelVersionViewSet(ReadOnlyModelViewSet[ModelVersion]):
    """Immutable descriptions of how a model is served, newest first. One is named `model@version`."""

    serializer_class = ModelVersionSerializer
    filterset_class = ModelVersionFilter
    lookup_url_kwarg = "id"
    lookup_value_regex = r"[^/@\x00-\x1f]+@[^/\x00-\x1f]+"
    page_order = "-id"

    def get_queryset(self) -> QuerySet[ModelVersion]:
        return ModelVersion.objects.all()

    def get_object(self) -> ModelVersion:
        version = version_by_reference(self.filter_queryset(self.get_queryset()), self.kwargs["id"])
        if version is None:
            raise Http404
        return version
