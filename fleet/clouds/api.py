"""Image moves over HTTP: parses requests and calls `fleet.clouds.services.images`. Never decides."""

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.clouds.models import IMAGE_LENGTH, ImageMove
from fleet.clouds.planning.upkeep import IMAGE_TONE, ImageState
from fleet.clouds.services.images import image_move_request, image_move_roll_back
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.rest.serializers import WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone

IMAGE_STATES = choices(ImageState)


class ImageMoveSerializer(serializers.ModelSerializer[ImageMove]):
    region = serializers.CharField(source="region_id")
    instance_type = serializers.CharField(source="instance_type_id")
    image = serializers.CharField(help_text="Empty until the region's stack was read, if the request named no image.")
    state = serializers.ChoiceField(choices=IMAGE_STATES)
    tone = serializers.SerializerMethodField()
    reason = serializers.CharField(help_text="The wait or the cause of this state.")
    booted = serializers.ListField(child=serializers.CharField(), help_text="Nodes that became ready on the new image.")
    failed = serializers.ListField(
        child=serializers.CharField(), help_text="Units that failed to boot from the new image."
    )

    class Meta:
        model = ImageMove
        fields = [
            "id", "region", "instance_type", "image", "state", "tone", "reason", "booted", "failed", "asked_by",
            "asked_at", "ended_at",
        ]  # fmt: skip
        examples: dict[str, list[str]] = {"booted": [], "failed": []}

    @extend_schema_field(serializers.ChoiceField(choices=choices(Tone)))
    def get_tone(self, move: ImageMove) -> str:
        return IMAGE_TONE[ImageState(move.state)].value


class AskImageSerializer(WhySerializer):
    region = serializers.CharField(max_length=64)
    instance_type = serializers.CharField(max_length=64)
    image = serializers.CharField(
        max_length=IMAGE_LENGTH,
        required=False,
        allow_blank=True,
        default="",
        help_text="ID of the image in the region; for tasks of ECS, its reference with a digest or an immutable tag. "
        "Empty: the image that the region's stack states now.",
    )

    class Meta:
        examples = {"image": "ami-0f9e8d7c6b5a43210", "why": "a new driver"}


class ImageMoveFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")
    instance_type = filters.CharFilter(field_name="instance_type_id")
    state = filters.MultipleChoiceFilter(choices=IMAGE_STATES, distinct=False, help_text="May be repeated.")


class ImageMoveViewSet(ReadOnlyModelViewSet[ImageMove]):
    """Moves of the machines of an instance type in a region to another image, newest first."""

    queryset = ImageMove.objects.all()
    serializer_class = ImageMoveSerializer
    filterset_class = ImageMoveFilter
    page_order = "-id"
    ordering_fields = ("id", "region", "instance_type", "state", "asked_at", "ended_at")
    watch_kind = "image-move"
    aliases = ("images",)
    columns = "ID, REGION, TYPE=instance_type, IMAGE, STATE, REASON, BY=asked_by, ASKED=asked_at:age"

    @extend_schema(operation_id="image_moves_ask", request=AskImageSerializer)
    def create(self, request: Request) -> Response:
        """Start moving the machines of an instance type to another image: first one unit, then one spare or cell at a
        time. The move is rolled back after two launches that fail to boot. The cloud is asked for the image first;
        without it the move is `refused` with a reason. Returns 409 while another move is under way, and if all pools
        already use the image."""
        asked = body_of(request, AskImageSerializer)
        move = image_move_request(
            asked["region"],
            asked["instance_type"],
            asked["image"],
            actor=actor_of(request),
            now=clock.now(),
            why=asked["why"],
        )
        return Response(self.get_serializer(move).data)

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def back(self, request: Request, id: str) -> Response:
        """Roll the move back: machines on the new image are replaced by machines on the old one. Returns 409 if the
        move is over or already going back."""
        return self.act_on_object(request, image_move_roll_back, "move_id")


ROUTES = (("image-moves", ImageMoveViewSet, "image-move"),)
