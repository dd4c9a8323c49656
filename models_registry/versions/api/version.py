"""Models and model versions over HTTP: create, edit, validate, release, retire, delete and compare them. Decides
nothing: services do."""

from functools import cache
from typing import Any

from django.db.models import QuerySet
from django.http import Http404
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.request_bodies import Modality
from kernel import clock
from kernel.access import access_of
from kernel.rest.serializers import StrictSerializer, actor_of, body_of, validated
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone
from models_registry.instance_types.selectors import instance_shapes
from models_registry.speculation.api import CalibrationActions
from models_registry.versions.api.memory import MemoryActions
from models_registry.versions.api.version_requests import CreateDraftSerializer, EditDraftSerializer, ReasonSerializer
from models_registry.versions.models import Model, ModelVersion, Validation
from models_registry.versions.planning.diff import (
    BY_TYPE,
    FIELD,
    Change,
    diff_versions,
    diff_without_values,
    without_values,
)
from models_registry.versions.planning.lifecycle import ValidationState, VersionState, choices
from models_registry.versions.selectors import (
    latest_validation,
    models_described,
    renderings,
    version_by_reference,
    version_stated,
    versions_described,
)
from models_registry.versions.services.drafts import (
    draft_change,
    draft_create,
    draft_delete,
    model_change,
    model_create,
    model_delete,
    version_release,
    version_retire,
)
from models_registry.versions.services.validation import validation_start


class ModelSerializer(serializers.ModelSerializer[Model]):
    versions = serializers.SerializerMethodField(help_text="`model@version`, newest first.")

    class Meta:
        model = Model
        fields = ["name", "description", "versions", "created_at"]
        examples = {"name": "smollm2"}

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_versions(self, model: Model) -> list[str]:
        return [version.reference for version in model.versions.all()]


class CreateModelSerializer(StrictSerializer):
    name = serializers.SlugField(max_length=96, help_text="The model name in inference requests.")
    description = serializers.CharField(max_length=2000, required=False, allow_blank=True, default="")

    class Meta:
        examples = {"name": "smollm2", "description": "SmolLM2 135M Instruct"}


class ChangeModelSerializer(StrictSerializer):
    description = serializers.CharField(max_length=2000, allow_blank=True)


class ModelFilter(filters.FilterSet):
    engine = filters.CharFilter(
        field_name="versions__engine", distinct=True, help_text="Has a version for this engine."
    )


class ModelViewSet(ReadOnlyModelViewSet[Model]):
    """A model under the name that applications request."""

    serializer_class = ModelSerializer
    filterset_class = ModelFilter
    lookup_field = "name"
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("name", "created_at")
    watch_kind = "model"
    needs_if_match = frozenset({"destroy"})
    columns = "NAME, VERSIONS, DESCRIPTION, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[Model]:
        return models_described()

    @extend_schema(request=CreateModelSerializer)
    def create(self, request: Request) -> Response:
        """Create a model without versions. 409 if the name is taken."""
        body = body_of(request, CreateModelSerializer)
        model = model_create(actor=actor_of(request), now=clock.now(), **body)
        return Response(ModelSerializer(self.get_queryset().get(pk=model.pk)).data)

    @extend_schema(request=ChangeModelSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Change the description of a model. Its name never changes."""
        return self.act_on_object(request, model_change, "name", ChangeModelSerializer)

    def destroy(self, request: Request, name: str) -> Response:
        """Delete a model without versions. Returns the deleted model. 409 while it has versions: drafts can be deleted;
        other versions can only be retired."""
        return self.remove_object(request, model_delete, "name")


ANY_VALUE = "Any JSON value; null if this side has none."


class DiffLineSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    before = serializers.JSONField(help_text=ANY_VALUE)
    after = serializers.JSONField(help_text=ANY_VALUE)
    change = serializers.ChoiceField(choices=choices(Change))

    class Meta:
        examples = {"name": "context_length", "before": 8192, "after": 8192}


class InstanceTypeDiffSerializer(serializers.Serializer[Any]):
    instance_type = serializers.CharField()
    change = serializers.ChoiceField(choices=choices(Change))
    problem_before = serializers.CharField(help_text="Why no cell is possible there; empty if one is.")
    problem_after = serializers.CharField(help_text="Why no cell is possible there; empty if one is.")
    degrees = DiffLineSerializer(many=True)
    arguments = DiffLineSerializer(many=True, help_text="Arguments of the engine; JSON values are compared key by key.")

    class Meta:
        examples = {"problem_before": "", "problem_after": ""}


class VersionDiffSerializer(serializers.Serializer[Any]):
    """Differences between two versions."""

    before = serializers.CharField(help_text="`model@version` to compare with.")
    after = serializers.CharField(help_text="`model@version`")
    same = serializers.BooleanField()
    fields = DiffLineSerializer(many=True)  # type: ignore[assignment] # the name that the document should show
    instance_types = InstanceTypeDiffSerializer(many=True)

    class Meta:
        examples = {"before": "sim-70b@1", "after": "sim-70b@2"}


class GoldenPromptSerializer(serializers.Serializer[Any]):
    prompt = serializers.CharField()
    expect = serializers.CharField()

    class Meta:
        examples = {"prompt": "2 + 2 =", "expect": "4"}


class AdapterSerializer(serializers.Serializer[Any]):
    name = serializers.CharField(help_text="The `model` in requests.")
    artifact_uri = serializers.CharField(default="")
    artifact_digest = serializers.CharField(default="")
    rank = serializers.IntegerField(allow_null=True, default=None, help_text="Null: not stated.")

    class Meta:
        examples = {"name": "smollm2-support"}


class DegreesSerializer(serializers.Serializer[Any]):
    nodes = serializers.IntegerField()
    tp = serializers.IntegerField(help_text="Tensor-parallel ranks of the whole cell.")
    cp = serializers.IntegerField(help_text="Context parallelism of prefill; divides `tp`.")
    dp = serializers.IntegerField(help_text="Data parallelism of decode; divides `tp`.")
    pp = serializers.IntegerField(help_text="Pipeline stages.")


class RenderingSerializer(serializers.Serializer[Any]):
    instance_type = serializers.CharField()
    engine = serializers.CharField(help_text="Engine on this instance type; empty if its fields cannot be read.")
    artifact_uri = serializers.CharField()
    artifact_digest = serializers.CharField()
    max_concurrency = serializers.IntegerField(help_text="Concurrent requests per cell.")
    problem = serializers.CharField(help_text="Why it cannot be served there: field, value and rule. Empty if it can.")
    degrees = DegreesSerializer(allow_null=True, help_text="Stated degrees, and defaults of the instance type.")
    arguments = serializers.ListField(
        child=serializers.CharField(), help_text="The engine's arguments, equal on every rank."
    )
    notes = serializers.ListField(child=serializers.CharField(), help_text="Warnings about allowed settings.")

    class Meta:
        examples = {"problem": "", "arguments": ["--max-model-len", "2048", "--tensor-parallel-size", "2"], "notes": []}


class ValidationSerializer(serializers.ModelSerializer[Validation]):
    """The last validation of a draft."""

    state = serializers.ChoiceField(choices=choices(ValidationState))
    tone = serializers.ChoiceField(choices=choices(Tone))
    evidence = serializers.DictField(help_text="Results: artifacts, instance types, golden prompts.")
    bytes_total = serializers.IntegerField(help_text="0 until the manifests were read.")
    bytes_done = serializers.IntegerField()

    class Meta:
        model = Validation
        fields = [
            "state", "tone", "reason", "actor", "files_done", "files_total", "bytes_done", "bytes_total", "evidence",
            "started_at", "ended_at",
        ]  # fmt: skip
        examples = {"evidence": {"golden_prompts": 1}}


class ModelVersionSerializer(serializers.ModelSerializer[ModelVersion]):
    id = serializers.CharField(source="reference", help_text="`model@version`")
    model = serializers.CharField(source="model_id")
    tone = serializers.ChoiceField(choices=choices(Tone))
    engine_build = serializers.CharField(help_text="Engine build that nodes fetch; empty: what is installed on them.")
    reason = serializers.CharField(help_text="Reason for its state.")
    revision = serializers.IntegerField(help_text="Increases with every change.")
    ready_timeout_s = serializers.FloatField()
    parallelism = serializers.DictField(
        child=serializers.DictField(child=serializers.IntegerField()),
        help_text="Instance type -> nodes per cell, and degrees over the whole cell: `tp`, `cp`, `dp`, `pp`.",
    )
    engine_options = serializers.DictField(help_text="The engine's own options, by name.")
    engine_env = serializers.DictField(help_text="Environment variables of the engine; viewers see their names only.")
    golden_prompts = GoldenPromptSerializer(many=True)
    golden_waiver = serializers.CharField(help_text="Why it has no golden prompts; empty if it has some.")
    speculation = serializers.DictField(
        help_text="`method` (`ngram`, `draft_model`, `medusa`, `eagle`, `eagle3`) and its settings; empty: none."
    )
    quantization = serializers.DictField(help_text="Quantization of the weights, in the engine's terms; empty: none.")
    adapters = AdapterSerializer(many=True, help_text="LoRA adapters, each served under its own name.")
    roles = serializers.DictField(
        child=serializers.DictField(),
        help_text="Differences of `prefill` and `decode` cells; empty: none.",
    )
    by_type = serializers.DictField(
        child=serializers.DictField(), help_text="Instance type -> fields that differ there; empty: equal on all."
    )
    modalities = serializers.ListField(
        child=serializers.ChoiceField(choices=[(one.value, one.value) for one in Modality]),
        help_text="Content that it serves in addition to text: `image`, `audio`, `video`.",
    )
    renderings = serializers.SerializerMethodField(help_text="A cell on each instance type.")
    validation = serializers.SerializerMethodField(help_text="Null before the first validation.")

    class Meta:
        model = ModelVersion
        fields = [
            "id", "model", "version", "state", "tone", "reason", "revision", "engine", "engine_build",
            "artifact_uri", "artifact_digest", "context_length", "max_concurrency", "ready_timeout_s",
            "attention_heads", "kv_heads", "layers", "parallelism", "speculation", "quantization", "adapters", "roles",
            "by_type", "modalities", "engine_options", "engine_env", "golden_prompts", "golden_waiver", "renderings",
            "validation", "created_at", "state_since",
        ]  # fmt: skip
        examples = {
            "id": "smollm2@1",
            "version": "1",
            "engine_build": "",
            "parallelism": {"local.cpu": {"nodes": 2, "tp": 2}},
            "by_type": {},
            "modalities": [],
            "golden_waiver": "",
        }

    def to_representation(self, instance: ModelVersion) -> dict[str, Any]:
        """Hides values of variables from viewers."""
        shown: dict[str, Any] = super().to_representation(instance)
        if not access_of(self.context["request"]).operate:
            shown |= {name: without_values(name, shown[name]) for name in (FIELD, BY_TYPE)}
        return shown

    @extend_schema_field(RenderingSerializer(many=True))
    def get_renderings(self, version: ModelVersion) -> list[dict[str, Any]]:
        machines = self.context["machines"]()
        return list(RenderingSerializer(renderings(version, machines), many=True).data)

    @extend_schema_field(ValidationSerializer(allow_null=True))
    def get_validation(self, version: ModelVersion) -> dict[str, Any] | None:
        validation = latest_validation(version)
        return ValidationSerializer(validation).data if validation else None


class ModelVersionFilter(filters.FilterSet):
    model = filters.CharFilter(field_name="model_id")
    engine = filters.CharFilter()
    state = filters.MultipleChoiceFilter(choices=choices(VersionState), distinct=False, help_text="May be repeated.")


class AgainstSerializer(StrictSerializer):
    against = serializers.CharField(max_length=170)


class ModelVersionViewSet(CalibrationActions, MemoryActions, ReadOnlyModelViewSet[ModelVersion]):
    """Model versions, newest first, named `model@version`. A draft may change; all other versions are immutable."""

    serializer_class = ModelVersionSerializer
    filterset_class = ModelVersionFilter
    lookup_url_kwarg = "id"
    lookup_value_regex = r"[^/@\x00-\x1f]+@[^/\x00-\x1f]+"
    page_order = "-id"
    ordering_fields = ("version", "state", "engine", "created_at", "state_since", "model")
    watch_kind = "model-version"
    measured = frozenset({"validation"})
    aliases = ("versions", "mv")
    columns = "VERSION=id, STATE, ENGINE, CONTEXT=context_length, SINCE=state_since:age, REASON"

    def get_queryset(self) -> QuerySet[ModelVersion]:
        return versions_described()

    def get_serializer_context(self) -> dict[str, Any]:
        """Adds the instance types, which are read once for a whole list."""
        return {**super().get_serializer_context(), "machines": cache(instance_shapes)}

    def watch_key(self, row: ModelVersion) -> str:
        return row.reference

    def get_object(self) -> ModelVersion:
        return self._version_or_404(self.filter_queryset(self.get_queryset()))

    def _version_or_404(self, versions: QuerySet[ModelVersion]) -> ModelVersion:
        version = version_by_reference(versions, self.kwargs["id"])
        if version is None:
            raise Http404
        return version

    @extend_schema(request=CreateDraftSerializer)
    def create(self, request: Request) -> Response:
        """Create a draft. `renderings` in the response says on which instance types a cell is possible, and what is
        wrong elsewhere. 409 if the model has a version of this name."""
        fields = body_of(request, CreateDraftSerializer)
        names = {name: fields.pop(name) for name in ("model", "version", "based_on")}
        made = draft_create(**names, columns=fields, actor=actor_of(request), now=clock.now())
        return self._answer(made.pk)

    @extend_schema(request=EditDraftSerializer)
    def partial_update(self, request: Request, id: str) -> Response:
        """Change fields of a draft. 409 if it is no longer a draft, is in use, or has a newer revision."""
        version = self.get_object()
        fields = body_of(request, EditDraftSerializer)
        revision = fields.pop("revision", None)
        draft_change(version_id=version.pk, columns=fields, revision=revision, actor=actor_of(request), now=clock.now())
        return self._answer(version.pk)

    def destroy(self, request: Request, id: str) -> Response:
        """Delete a draft. Returns the deleted draft. 409 if it is no longer a draft, or is in use."""
        return self.remove_object(request, draft_delete, "version_id")

    @action(detail=True, methods=["post"])
    def validate(self, request: Request, id: str) -> Response:
        """Start the validation of a draft: its artifacts are read and compared with their digests, a cell must be
        possible on an instance type, and it needs golden prompts or a waiver. The validation continues after this
        response; `validation` shows its progress and why it failed. 409 if it is not a draft, or is being validated."""
        return self.act_on_object(request, validation_start, "version_id", accepted=None)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    def release(self, request: Request, id: str) -> Response:
        """Release a validated version, so that it can be rolled out. 409 if it is not validated."""
        return self.act_on_object(request, version_release, "version_id", ReasonSerializer)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    def retire(self, request: Request, id: str) -> Response:
        """Retire a version permanently. 409 while a deployment, an active rollout or a live cell uses it."""
        return self.act_on_object(request, version_retire, "version_id", ReasonSerializer)

    @extend_schema(
        parameters=[OpenApiParameter("against", str, required=True, description="`model@version` to compare with.")],
        responses={200: VersionDiffSerializer},
    )
    @action(detail=True, methods=["get"])
    def diff(self, request: Request, id: str) -> Response:
        """Differences between this version and another: their fields, and a cell of each on every instance type, side
        by side."""
        fields = validated(AgainstSerializer, request.query_params.dict())
        version = self._version_or_404(self.get_queryset())
        against = version_stated(fields["against"], field="against", versions=self.get_queryset())
        difference = diff_versions(against.spec(), version.spec(), instance_shapes())
        if not access_of(request).operate:
            difference = diff_without_values(difference)
        return Response(VersionDiffSerializer(difference).data)

    def _answer(self, version_id: int) -> Response:
        return Response(self.get_serializer(self.get_queryset().get(pk=version_id)).data)


ROUTES = (
    ("models", ModelViewSet, "model"),
    ("model-versions", ModelVersionViewSet, "model-version"),
)
