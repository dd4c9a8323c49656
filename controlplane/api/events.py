"""Events over HTTP, newest first. Read-only: an event is written in the transaction of its change."""

from django import forms
from django_filters import rest_framework as filters
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from fleet.reconcile.planning.states import choices
from kernel.models import Event
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone


class EventSerializer(serializers.ModelSerializer[Event]):
    tone = serializers.ChoiceField(choices=choices(Tone))
    detail = serializers.DictField(help_text="Details; the keys depend on the kind.")

    class Meta:
        model = Event
        fields = ["id", "at", "kind", "tone", "message", "actor", "region", "deployment", "cell", "node", "detail"]
        examples = {
            "kind": "cell.ready",
            "message": "sim-70b-us-east-1-1 is ready: all 2 ranks are ready",
            "detail": {"generation": 1},
        }


@extend_schema_field(OpenApiTypes.INT64)
class WholeNumberFilter(filters.Filter):
    field_class = forms.IntegerField


class EventFilter(filters.FilterSet):
    kind = filters.CharFilter(help_text="For example `cell.ready`.")
    tone = filters.MultipleChoiceFilter(choices=choices(Tone), distinct=False, help_text="May be repeated.")
    actor = filters.CharFilter(help_text="User, or `switchyard` for the control plane itself.")
    region = filters.CharFilter()
    deployment = filters.CharFilter()
    cell = filters.CharFilter()
    node = filters.CharFilter()
    since = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At or after.")
    until = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt", help_text="Before.")
    since_id = WholeNumberFilter(field_name="id", lookup_expr="gt", help_text="Only events with a greater ID.")


class EventViewSet(ReadOnlyModelViewSet[Event]):
    """Events of the fleet, newest first. Kept for 30 days."""

    queryset = Event.objects.all()
    serializer_class = EventSerializer
    filterset_class = EventFilter
    lookup_value_regex = r"[0-9]+"
    page_order = "-id"
    ordering_fields = ("id", "at", "kind", "actor")
    watch_kind = "event"
    aliases = ("ev",)
    columns = "AGO=at:age, KIND, ACTOR, MESSAGE"
