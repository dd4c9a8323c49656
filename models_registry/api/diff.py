"""The difference between two versions, as the API shows it."""

from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema_serializer
from rest_framework import serializers

from models_registry.api import examples
from models_registry.planning.diff import Change
from models_registry.planning.lifecycle import choices

ANY_VALUE = "Any JSON value; null where this side has none."


class DiffLineSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    before = serializers.JSONField(help_text=ANY_VALUE)
    after = serializers.JSONField(help_text=ANY_VALUE)
    change = serializers.ChoiceField(choices=choices(Change))


class InstanceTypeDiffSerializer(serializers.Serializer[Any]):
    instance_type = serializers.CharField()
    change = serializers.ChoiceField(choices=choices(Change))
    problem_before = serializers.CharField(help_text="Why no cell can be made of it there; empty if one can.")
    problem_after = serializers.CharField(help_text="Why no cell can be made of it there; empty if one can.")
    degrees = DiffLineSerializer(many=True)
    arguments = DiffLineSerializer(many=True, help_text="Of the engine; JSON inside one is compared name by name.")


@extend_schema_serializer(examples=[OpenApiExample("a faster step", examples.DIFF, response_only=True)])
class VersionDiffSerializer(serializers.Serializer[Any]):
    """What differs between two versions, side by side."""

    before = serializers.CharField(help_text="`model@version` that the other is compared against.")
    after = serializers.CharField(help_text="`model@version`")
    same = serializers.BooleanField()
    fields = DiffLineSerializer(many=True)  # type: ignore[assignment] # the name that the document should show
    instance_types = InstanceTypeDiffSerializer(many=True)
