"""Calibrations of a version over HTTP, as actions of the version. Decides nothing: services do."""

from typing import Any

from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from models_registry.speculation.services import calibration_store
from models_registry.versions.models import ModelVersion, SpeculationCalibration
from models_registry.versions.selectors import latest_calibration


class StoreCalibrationSerializer(StrictSerializer):
    calibration = serializers.DictField(help_text="The `calibration.json` that the trainer wrote with the heads.")
    step_costs = serializers.ListField(
        child=serializers.DictField(),
        required=False,
        default=list,
        help_text="Step costs by number of verified tokens, one object per instance type.",
    )


class CalibratedTaskSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    positions = serializers.IntegerField(help_text="Number of calibration answers.")
    accuracies = serializers.ListField(
        child=serializers.ListField(child=serializers.FloatField()),
        help_text="By head, then by rank: share of positions at which this guess was right.",
    )
    chain = serializers.ListField(
        child=serializers.FloatField(), help_text="Tokens per step, by number of guessed tokens in a chain."
    )
    paths = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField()),
        help_text="The first n are the tree of size n.",
    )
    counts = serializers.ListField(child=serializers.IntegerField(), help_text="Positions at which a path was right.")
    tree = serializers.ListField(child=serializers.FloatField(), help_text="Tokens per step, by size of the tree.")

    class Meta:
        examples = {"name": "plan"}


class ChoiceSerializer(serializers.Serializer[Any]):
    task = serializers.CharField()
    instance_type = serializers.CharField()
    source = serializers.CharField(  # type: ignore[assignment] # the name that the document should show
        help_text="Source of step costs: `measured` or `given`."
    )
    hardware = serializers.CharField()
    is_tree = serializers.BooleanField()
    tokens = serializers.IntegerField(help_text="Guessed tokens for one sequence; for a tree, its paths.")
    gain = serializers.FloatField(help_text="Tokens per second relative to no speculation, for one sequence.")
    ranges = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField()),
        help_text="`tokens_per_batch_size` for a version on vLLM.",
    )
    off_from = serializers.IntegerField(allow_null=True, help_text="Batch size from which speculation is off.")
    gains = serializers.DictField(child=serializers.FloatField(), help_text="By batch size.")
    reason = serializers.CharField()

    class Meta:
        examples = {"task": "plan", "source": "measured", "hardware": "x86_64", "gains": {"1": 1.9, "8": 1.1, "9": 1.0}}


class CalibrationSerializer(serializers.ModelSerializer[SpeculationCalibration]):
    version = serializers.CharField(source="version.reference", help_text="`model@version`")
    figures = CalibratedTaskSerializer(many=True, help_text="By task.")
    choices = ChoiceSerializer(many=True, help_text="By task and instance type.")

    class Meta:
        model = SpeculationCalibration
        fields = ["id", "version", "figures", "choices", "actor", "created_at"]
        examples = {"version": "smollm2@135m-medusa"}


class CalibrationActions:
    """Actions of the view set of model versions."""

    @extend_schema(operation_id="model_versions_calibration", responses={200: CalibrationSerializer})
    @action(detail=True, methods=["get"], pagination_class=None, filterset_class=None)
    def calibration(self, request: Request, id: str) -> Response:
        """How often this version's guesses are right, and how many tokens it should guess. 404 before the first
        calibration."""
        version: ModelVersion = self.get_object()  # type: ignore[attr-defined]
        found = latest_calibration(version)
        if found is None:
            raise Http404
        return Response(CalibrationSerializer(found).data)

    @extend_schema(
        operation_id="model_versions_calibrate",
        request=StoreCalibrationSerializer,
        responses={200: CalibrationSerializer},
    )
    @action(detail=True, methods=["post"])
    def calibrate(self, request: Request, id: str) -> Response:
        """Store a calibration of this version's heads. The newest counts; the version does not change. 400 if it cannot
        be read, or if its method, model or number of heads differs."""
        version: ModelVersion = self.get_object()  # type: ignore[attr-defined]
        body = body_of(request, StoreCalibrationSerializer)
        stored = calibration_store(
            version_id=version.pk,
            document=body["calibration"],
            step_costs=body["step_costs"],
            actor=actor_of(request),
            now=clock.now(),
        )
        return Response(CalibrationSerializer(stored).data)
