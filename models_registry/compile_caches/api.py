"""Compile caches over HTTP: lists them and deletes them. Agents use `fleet.agents.api.files`."""

from django_filters import rest_framework as filters
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel.access import Role
from kernel.rest.serializers import RecordSerializer
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from models_registry.compile_caches.models import CompileCache
from models_registry.compile_caches.services import cache_delete


class CompileCacheSerializer(RecordSerializer[CompileCache]):
    version = serializers.CharField(source="version.reference", help_text="`model@version` of its engine.")

    class Meta:
        model = CompileCache
        fields = [
            "id", "version", "instance_type", "rank", "key", "digest", "packed_bytes", "unpacked_bytes", "node", "cell",
            "uses", "used_at", "created_at",
        ]  # fmt: skip
        examples = {
            "version": "smollm2@1",
            "instance_type": "local.cpu",
            "rank": 0,
            "digest": "sha256:" + 8 * "77ab10cd",
            "packed_bytes": 6_100_000,
            "node": "n-00000001",
            "cell": "smollm2-us-east-1-1",
        }


class CompileCacheFilter(filters.FilterSet):
    model = filters.CharFilter(field_name="version__model", help_text="Name of the model.")
    version = filters.CharFilter(field_name="version__version", help_text="Version without its model.")
    node = filters.CharFilter(help_text="Node whose engine compiled it.")
    digest = filters.CharFilter()


class CompileCacheViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[CompileCache]):
    """What engines compiled, which nodes fetch before they start an engine of the same version, on the same instance
    type and with the same software. Cells upload them when they serve."""

    queryset = CompileCache.objects.select_related("version")
    serializer_class = CompileCacheSerializer
    filterset_class = CompileCacheFilter
    page_order = "-id"
    needs = {"destroy": Role.ADMIN}
    ordering_fields = ("id", "packed_bytes", "uses", "used_at", "created_at")
    columns = "ID, VERSION, TYPE=instance_type, RANK, SIZE=packed_bytes, NODE, CELL, USES, USED=used_at:age"

    def destroy(self, request: Request, id: str) -> Response:
        """Delete a cache. Nodes that have a copy keep it; the next one without a copy compiles and uploads another."""
        return self.remove_object(request, cache_delete, "id")


ROUTES = (("compile-caches", CompileCacheViewSet, "compile-cache"),)
