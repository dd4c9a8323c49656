"""Base serializers of requests that change something. Unknown fields are refused."""

from typing import Any

from rest_framework import serializers
from rest_framework.request import Request

from kernel.models import Event

_LONGEST_ACTOR = Event._meta.get_field("actor").max_length


def actor_of(request: Request) -> str:
    """Returns the caller's user name, cut to the length of event rows."""
    return request.user.get_username()[:_LONGEST_ACTOR]


class StrictSerializer(serializers.Serializer[Any]):
    """Refuses unknown fields, so that a misspelt one is not ignored."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and (unknown := sorted(set(map(str, data)) - set(self.fields))):
            allowed = ", ".join(self.fields)
            raise serializers.ValidationError(
                {name: serializers.ErrorDetail(f"unknown field; allowed: {allowed}", "unknown") for name in unknown}
            )
        return super().to_internal_value(data)


class WhySerializer(StrictSerializer):
    """An action's reason in the operator's words."""

    why = serializers.CharField(
        required=False, allow_blank=True, max_length=200, default="", help_text="Your reason, for the timeline."
    )
