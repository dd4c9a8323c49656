"""Engine builds over HTTP: parses requests and calls services. Never decides."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.generics import get_object_or_404
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from engine_agent.protocol.engine_builds import MOST_FACTS_BYTES, MOST_PARTS
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import ColumnsSerializer, RecordSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from models_registry.builds.models import FACTS, NAME, EngineBuild, EngineBuildUpload
from models_registry.builds.services.builds import build_add, build_delete
from models_registry.builds.services.uploads import (
    CHUNK_BYTES,
    upload_delete,
    upload_finish,
    upload_part_store,
    upload_start,
)


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
        """Delete a build that no version names. Uploaded files are deleted with it, other files stay. Nodes remove
        theirs when they need room."""
        return self.remove_object(request, build_delete, "name")


class EngineBuildUploadSerializer(RecordSerializer[EngineBuildUpload]):
    class Meta:
        model = EngineBuildUpload
        fields = [
            "name", "digest", "parts", "parts_done", "packed_bytes", "bytes_done", "actor", "created_at", "touched_at",
        ]  # fmt: skip
        examples = {"name": "vllm-0.32.0-cpu", "digest": "sha256:" + 8 * "77ab10cd", "parts": 41, "parts_done": 7}


class StartUploadSerializer(ColumnsSerializer):
    name = serializers.RegexField(rf"^{NAME}$", max_length=64, help_text="Name of the build; versions state it.")
    facts = serializers.CharField(
        trim_whitespace=False, max_length=MOST_FACTS_BYTES, help_text="Text of its `build.json`, unchanged."
    )
    digests = serializers.ListField(
        child=serializers.RegexField(r"^[0-9a-f]{64}$", max_length=64),
        max_length=MOST_PARTS,
        help_text="SHA-256 of each part in hexadecimal, in order.",
    )

    class Meta:
        model = EngineBuildUpload
        columns = ()
        examples = {"name": "vllm-0.32.0-cpu", "facts": "{}", "digests": [8 * "77ab10cd"]}


class PartParser(BaseParser):
    """Leaves the body of a part on disk, where the server put it while it arrived."""

    media_type = "application/octet-stream"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        return stream


class EngineBuildUploadViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[EngineBuildUpload]):
    """Builds that are being uploaded in parts: `create`, `part` for each part in order, `finish`. An upload without a
    new part for a day is deleted. `switchyard engine add` uploads a folder."""

    queryset = EngineBuildUpload.objects.all()
    serializer_class = EngineBuildUploadSerializer
    lookup_field = "name"
    lookup_value_regex = NAME
    page_order = "name"
    needs = {"create": Role.ADMIN, "part": Role.ADMIN, "finish": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("name", "created_at", "touched_at")
    measured = frozenset({"parts_done", "bytes_done", "touched_at"})
    audit_exempt = ""
    columns = "NAME, PARTS=parts_done, OF=parts, BYTES=bytes_done, OF=packed_bytes, AGE=created_at:age"

    @extend_schema(request=StartUploadSerializer)
    def create(self, request: Request) -> Response:
        """Start an upload, or continue the one with this name and content: `parts_done` is the part that must follow.
        409 if the name is taken, or there is no room."""
        row = upload_start(**body_of(request, StartUploadSerializer), actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    @extend_schema(
        request={"application/octet-stream": OpenApiTypes.BINARY},
        parameters=[OpenApiParameter("number", int, required=True, description="Number of the part, from 0.")],
    )
    @action(
        detail=True,
        methods=["put"],
        parser_classes=[PartParser],
        audit_exempt="start and end of an upload are recorded; a part alone changes nothing",
    )
    def part(self, request: Request, name: str) -> Response:
        """Send one part. A part that is stored already is ignored. 409 if another part must follow."""
        stated = str(request.query_params.get("number", ""))
        number = int(stated) if stated.isdecimal() and stated.isascii() and len(stated) < 6 else MOST_PARTS
        body: Any = request.data
        get_object_or_404(EngineBuildUpload, name=name)  # `get_object` accepts no parameters
        row = upload_part_store(name=name, number=number, chunks=_chunks(body), now=clock.now())
        return Response(self.get_serializer(row).data)

    @action(detail=True, methods=["post"])
    def finish(self, request: Request, name: str) -> Response:
        """Complete an upload whose parts have all arrived, and add its build. 409 if parts are missing."""
        shown = self.get_serializer(self.get_object()).data
        upload_finish(name=name, actor=actor_of(request), now=clock.now())
        return Response(shown)

    def destroy(self, request: Request, name: str) -> Response:
        """Delete an upload with its parts."""
        return self.remove_object(request, upload_delete, "name")


def _chunks(body: BinaryIO) -> Iterator[bytes]:
    while chunk := body.read(CHUNK_BYTES):
        yield chunk


ROUTES = (
    ("engine-builds", EngineBuildViewSet, "engine-build"),
    ("engine-build-uploads", EngineBuildUploadViewSet, "engine-build-upload"),
)
