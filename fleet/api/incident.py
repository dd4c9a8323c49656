"""Incidents over HTTP: open faults with their evidence, and how the closed ones ended. Read only."""

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema_serializer
from rest_framework import serializers
from rest_framework.viewsets import ReadOnlyModelViewSet

from controlplane.kernel.tones import Tone
from fleet.api import examples
from fleet.models import Incident
from fleet.planning.states import IncidentState, choices


@extend_schema_serializer(examples=[OpenApiExample("incident", examples.INCIDENT, response_only=True)])
class IncidentSerializer(serializers.ModelSerializer[Incident]):
    tone = serializers.ChoiceField(choices=choices(Tone))
    evidence = serializers.DictField(help_text="What was seen; its keys depend on the kind.")

    class Meta:
        model = Incident
        fields = [
            "id", "kind", "subject", "state", "tone", "summary", "resolution", "region", "deployment", "cell", "node",
            "evidence", "opened_at", "closed_at",
        ]  # fmt: skip


class IncidentFilter(filters.FilterSet):
    state = filters.MultipleChoiceFilter(choices=choices(IncidentState), distinct=False, help_text="May be repeated.")
    kind = filters.CharFilter()
    subject = filters.CharFilter()
    region = filters.CharFilter()
    deployment = filters.CharFilter()
    cell = filters.CharFilter()
    node = filters.CharFilter()
    since = filters.IsoDateTimeFilter(field_name="opened_at", lookup_expr="gte", help_text="Opened at or after.")
    until = filters.IsoDateTimeFilter(field_name="opened_at", lookup_expr="lt", help_text="Opened before.")

    class Meta:
        model = Incident
        fields: list[str] = []


class IncidentViewSet(ReadOnlyModelViewSet[Incident]):
    """Faults, newest first."""

    serializer_class = IncidentSerializer
    filterset_class = IncidentFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]+"
    page_order = "-id"

    def get_queryset(self) -> QuerySet[Incident]:
        return Incident.objects.all()
