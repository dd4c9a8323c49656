"""Memory of a version over HTTP, as an action of the version. Decides nothing."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.checkpoint import Attention
from models_registry.versions.planning.lifecycle import choices
from models_registry.versions.planning.memory import Source
from models_registry.versions.selectors import version_memory


class MemoryLineSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    value = serializers.FloatField()
    unit = serializers.CharField(help_text="`bytes`, `tokens` or `requests`.")
    source = serializers.ChoiceField(choices=choices(Source))  # type: ignore[assignment]
    how = serializers.CharField(help_text="How the value was computed.")

    class Meta:
        examples = {"name": "KV cache per token", "value": 23040.0, "unit": "bytes", "source": "read"}


class MemorySerializer(serializers.Serializer[Any]):
    """Of one device, which runs one rank."""

    lines = MemoryLineSerializer(many=True, help_text="The arithmetic, in order.")
    weights_bytes = serializers.IntegerField()
    kv_bytes_per_token = serializers.IntegerField()
    kv_bytes = serializers.IntegerField(help_text="Room for the KV cache.")
    tokens = serializers.IntegerField(help_text="Tokens that fit at the same time.")
    requests = serializers.FloatField(help_text="Requests of maximum length that fit at the same time.")
    shortfall = serializers.CharField(help_text="What does not fit; empty if everything fits.")
    is_certain = serializers.BooleanField(
        help_text="The shortfall follows from tables and files, so validation refuses it; otherwise from an estimate."
    )
    notes = serializers.ListField(child=serializers.CharField())

    class Meta:
        examples = {"shortfall": "", "notes": []}


class ShapeSerializer(serializers.Serializer[Any]):
    model_type = serializers.CharField()
    attention = serializers.ChoiceField(choices=choices(Attention))
    layers = serializers.IntegerField()
    hidden = serializers.IntegerField()
    heads = serializers.IntegerField()
    kv_heads = serializers.IntegerField()
    head_dim = serializers.IntegerField()
    vocabulary = serializers.IntegerField()
    window = serializers.IntegerField(help_text="Tokens of a sliding window; 0: none.")
    experts = serializers.IntegerField(help_text="0: dense.")
    dtype = serializers.CharField()
    quantization = serializers.CharField(help_text="Method of the checkpoint; empty: none.")
    longest = serializers.IntegerField(help_text="Longest context of the model; 0: not stated.")

    class Meta:
        examples = {"model_type": "llama", "dtype": "bfloat16", "quantization": ""}


class CheckpointSerializer(serializers.Serializer[Any]):
    shape = ShapeSerializer()
    values = serializers.IntegerField(source="weights.values", help_text="Floating-point values of the weights.")
    from_headers = serializers.BooleanField(
        source="weights.from_headers", help_text="Sizes were read from safetensors headers, not computed."
    )


class CellMemorySerializer(serializers.Serializer[Any]):
    instance_type = serializers.CharField()
    engine = serializers.CharField()
    problem = serializers.CharField(help_text="Why no cell is possible, or why there is no arithmetic.")
    memory = MemorySerializer(allow_null=True)

    class Meta:
        examples = {"problem": ""}


class ProposedDegreesSerializer(serializers.Serializer[Any]):
    nodes = serializers.IntegerField()
    tp = serializers.IntegerField()

    class Meta:
        examples = {"nodes": 1, "tp": 8}


class ProposalSerializer(serializers.Serializer[Any]):
    instance_type = serializers.CharField()
    engine = serializers.CharField()
    degrees = ProposedDegreesSerializer()
    quantization = serializers.CharField(help_text="Method that the engine applies at load; empty: none.")
    price_per_hour = serializers.FloatField(help_text="US dollars per cell and hour; 0: unknown.")
    price = serializers.FloatField(
        help_text="US dollars per hour for a million tokens that fit at the same time; 0: unknown."
    )
    problem = serializers.CharField(help_text="Why it cannot be served there; empty if it can.")
    memory = MemorySerializer(allow_null=True)

    class Meta:
        examples = {"quantization": "", "problem": ""}


class VersionMemorySerializer(serializers.Serializer[Any]):
    version = serializers.CharField(help_text="`model@version`")
    problem = serializers.CharField(help_text="Why there is no arithmetic; empty if there is.")
    checkpoint = CheckpointSerializer(allow_null=True, help_text="Facts of its artifact, which validation read.")
    cells = CellMemorySerializer(many=True, help_text="On the instance types of the version.")
    proposals = ProposalSerializer(many=True, help_text="On all instance types; cheapest first, impossible ones last.")

    class Meta:
        examples = {"version": "smollm2@1", "problem": ""}


class MemoryActions:
    """Actions of the view set of model versions."""

    @extend_schema(operation_id="model_versions_memory", responses={200: VersionMemorySerializer})
    @action(detail=True, methods=["get"], pagination_class=None, filterset_class=None)
    def memory(self, request: Request, id: str) -> Response:
        """The memory that the version needs per device on its instance types, line by line, and proposals for all
        instance types.
        Validation must have read its artifact, even if it failed."""
        version: ModelVersion = self.get_object()  # type: ignore[attr-defined]
        return Response(VersionMemorySerializer(version_memory(version, instance_shapes())).data)
