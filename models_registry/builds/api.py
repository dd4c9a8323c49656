"""Engine builds over HTTP: parses requests and calls services. Never decides."""

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from models_registry.builds.models import FACTS, NAME, EngineBuild
from models_registry.builds.services import build_add, build_delete


class EngineBuildSerializer(RecordSerializer[EngineBuild]):
    class Meta:
        model = EngineBuild
        fields = ["name", "uri", "digest", *FACTS, "actor", "created_at"]
        examples = {"name": "vllm-0.32.0-cpu", "serves": "vllm", "version": "0.32.0", "platform": "cpu-avx2"}


class AddEngineBuildSerializer(ColumnsSerializer):
    name = serializers.RegexField(
        rf"^{NAME}$", max_length=64, help_text="Lower-case letters, digits, `.`, `_` and `-`; versions state it."
    )

    class Meta:
        model = EngineBuild
        columns = ("uri", "digest")
        examples = {"name": "vllm-0.32.0-cpu", "uri": "file:///srv/builds/vllm-0.32.0-cpu"}


class EngineBuildViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[EngineBuild]):
    """Engines that agents fetch, with their own Python. A version names one as `engine_build`; others run what is
    installed on the node."""

    queryset = EngineBuild.objects.all()
    serializer_class = EngineBuildSerializer
    filterset_fields = ("serves", "platform", "cpu_arch")
    lookup_field = "name"
    lookup_value_regex = NAME
    page_order = "name"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("name", "serves", "version", "created_at")
    aliases = ("builds",)
    columns = (
        "NAME, ENGINE=serves, VERSION, PLATFORM, CPU=cpu_arch, GLIBC=least_glibc, DRIVER=least_driver, PYTHON, "
        "SIZE=packed_bytes, AGE=created_at:age"
    )

    @extend_schema(request=AddEngineBuildSerializer)
    def create(self, request: Request) -> Response:
        """Add the build that `switchyard engine build` packed to a folder or bucket of the artifact sources. 409 if the
        name is taken."""
        body = body_of(request, AddEngineBuildSerializer)
        row = build_add(**body, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    def destroy(self, request: Request, name: str) -> Response:
        """Delete a build that no version names. Its files stay where they are; nodes remove theirs when they need
        room."""
        return self.remove_object(request, build_delete, "name")


ROUTES = (("engine-builds", EngineBuildViewSet, "engine-build"),)
