"""Imports over HTTP: start, follow, cancel and retry them, and draft a version from one. Decides nothing: services
do."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone
from models_registry.imports.models import ModelImport
from models_registry.imports.planner import ImportState
from models_registry.imports.services.imports import import_cancel, import_draft, import_retry, import_start
from models_registry.versions.planning.lifecycle import choices


class ModelImportSerializer(RecordSerializer[ModelImport]):
    tone = serializers.ChoiceField(choices=choices(Tone))

    class Meta:
        model = ModelImport
        fields = [
            "id", "source", "pattern", "draft", "engine", "state", "tone", "reason", "revision", "license", "tags",
            "configuration", "artifact_uri", "artifact_digest", "files_total", "files_done", "bytes_total",
            "bytes_done", "bytes_per_s", "actor", "created_at", "ended_at",
        ]  # fmt: skip
        examples = {
            "source": "hf://HuggingFaceTB/SmolLM2-135M-Instruct@main",
            "pattern": "",
            "draft": "smollm2@1",
            "engine": "vllm",
            "state": "running",
            "tone": "moving",
            "reason": "fetches files",
            "revision": 5 * "12fd25f7",
            "license": "apache-2.0",
            "tags": ["text-generation"],
            "configuration": {"attention_heads": 9, "kv_heads": 3, "layers": 30, "context_length": 8192},
        }


class ImportSourceSerializer(ColumnsSerializer):
    """The document `ModelImport`, whose name is the version to draft."""

    class Meta:
        model = ModelImport
        columns = ("source", "pattern", "engine")
        examples = {"source": "hf://HuggingFaceTB/SmolLM2-135M-Instruct@main", "pattern": "", "engine": "vllm"}


class StartImportSerializer(ColumnsSerializer):
    class Meta:
        model = ModelImport
        columns = ("source", "pattern", "draft", "engine")
        examples = {
            "source": "hf://HuggingFaceTB/SmolLM2-135M-Instruct@main",
            "pattern": "",
            "draft": "smollm2@1",
            "engine": "vllm",
        }


class DraftImportSerializer(ColumnsSerializer):
    draft = serializers.CharField(max_length=161, help_text="`model@version`; a new model is created.")

    class Meta:
        model = ModelImport
        columns = ("engine",)
        examples = {"draft": "smollm2@1", "engine": "vllm"}


class ModelImportFilter(filters.FilterSet):
    state = filters.ChoiceFilter(choices=choices(ImportState))
    source = filters.CharFilter(lookup_expr="startswith", help_text="Its beginning.")


class ModelImportViewSet(ReadOnlyModelViewSet[ModelImport]):
    """Models that are fetched by name from a hub into the artifact store, each at one commit and verified."""

    serializer_class = ModelImportSerializer
    filterset_class = ModelImportFilter
    page_order = "-id"
    ordering_fields = ("id", "source", "state", "created_at", "ended_at")
    watch_kind = "model-import"
    measured = frozenset({"bytes_done", "bytes_per_s", "files_done", "reason"})
    columns = (
        "ID, SOURCE, STATE, FILES=files_done, OF=files_total, BYTES=bytes_done, OF=bytes_total, REASON, "
        "AGE=created_at:age"
    )

    def get_queryset(self) -> QuerySet[ModelImport]:
        return ModelImport.objects.all()

    @extend_schema(request=StartImportSerializer)
    def create(self, request: Request) -> Response:
        """Fetch a model from a hub into the artifact store. The job runs after this response. 409 if the same import or
        too many are open."""
        fields = body_of(request, StartImportSerializer)
        row = import_start(**fields, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, id: str) -> Response:
        """Cancel an import that waits or runs, and drop its unfinished files. 409 if it has ended."""
        return self.act_on_object(request, import_cancel, "import_id", accepted=None)

    @action(detail=True, methods=["post"])
    def retry(self, request: Request, id: str) -> Response:
        """Continue a failed or cancelled import; verified files are kept. 409 in other states."""
        return self.act_on_object(request, import_retry, "import_id", accepted=None)

    @extend_schema(request=DraftImportSerializer)
    @action(detail=True, methods=["post"])
    def draft(self, request: Request, id: str) -> Response:
        """Draft a version that serves the imported model, with its heads, layers and context length. 409 if the import
        is not done, or the version exists."""
        return self.act_on_object(request, import_draft, "import_id", DraftImportSerializer)


ROUTES = (("model-imports", ModelImportViewSet, "model-import"),)
