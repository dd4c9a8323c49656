"""Incidents and the modes of fault rules over HTTP. Parses and renders; services decide."""

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import Http404
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.faults.models import FaultRule, Incident, IncidentNote, IncidentPart, Replacement
from fleet.faults.planning.severity import CRITICAL, MINOR, Severity
from fleet.faults.planning.views import SETTABLE_RULES, PartNoun, Rule, RuleMode
from fleet.faults.services.incidents import incident_dismiss
from fleet.faults.services.triage import NOTE_MAX, incident_acknowledge, incident_assign, incident_note_add
from fleet.faults.services.watch import fault_rule_set
from fleet.reconcile.planning.states import IncidentState, choices
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet
from kernel.tones import Tone


class ReplacementSerializer(serializers.ModelSerializer[Replacement]):
    node = serializers.CharField(source="node_id")

    class Meta:
        model = Replacement
        fields = [
            "id", "node", "cell", "rule", "reason", "actor", "opened_at", "begun_at", "closed_at", "resolution",
        ]  # fmt: skip


class IncidentPartSerializer(serializers.ModelSerializer[IncidentPart]):
    class Meta:
        model = IncidentPart
        fields = ["noun", "name", "since", "recovered_at"]


class IncidentNoteSerializer(serializers.ModelSerializer[IncidentNote]):
    class Meta:
        model = IncidentNote
        fields = ["at", "actor", "text"]


class IncidentSerializer(serializers.ModelSerializer[Incident]):
    tone = serializers.ChoiceField(choices=choices(Tone))
    evidence = serializers.DictField(help_text="The observations; the keys depend on the kind.")
    cohort = serializers.CharField(help_text="The group of similar machines that it was compared with.")
    shadow = serializers.BooleanField(help_text="Its rule is in shadow mode, which reports and changes nothing.")
    seen_at = serializers.DateTimeField(allow_null=True, help_text="When the fault was last seen.")
    closed_by = serializers.CharField(help_text="Empty while the incident is open.")
    severity = serializers.ChoiceField(choices=choices(Severity), help_text="Follows from the kind.")
    runbook = serializers.CharField(help_text="Name of its page in docs/runbooks; empty if it has none.")
    acknowledged_by = serializers.CharField(help_text="Empty until a user has acknowledged it.")
    owner = serializers.CharField(help_text="The user who works on it, or empty.")
    parts = IncidentPartSerializer(many=True, help_text="Nodes and cells that the fault hit.")
    notes = IncidentNoteSerializer(many=True, help_text="Notes of users, oldest first.")
    replacements = ReplacementSerializer(many=True, help_text="Node replacements opened for it.")

    class Meta:
        model = Incident
        fields = [
            "id", "kind", "severity", "subject", "state", "tone", "summary", "resolution", "region", "deployment",
            "cell", "node", "evidence", "cohort", "shadow", "seen_at", "opened_at", "closed_at", "closed_by",
            "acknowledged_by", "acknowledged_at", "owner", "runbook", "parts", "notes", "replacements",
        ]  # fmt: skip
        examples = {
            "kind": "node-lost",
            "subject": "n-4e5f6a7b",
            "summary": "Node n-4e5f6a7b lost: its machine is gone",
            "evidence": {"reason": "its machine is gone"},
            "cohort": "",
            "closed_by": "",
            "acknowledged_by": "ada",
            "owner": "ada",
            "runbook": "node-lost",
        }


class IncidentFilter(filters.FilterSet):
    state = filters.MultipleChoiceFilter(choices=choices(IncidentState), distinct=False, help_text="May be repeated.")
    kind = filters.CharFilter()
    subject = filters.CharFilter()
    region = filters.CharFilter()
    deployment = filters.CharFilter()
    cell = filters.CharFilter(method="filter_cell", help_text="Also finds incidents of nodes that broke this cell.")
    node = filters.CharFilter(
        method="filter_node", help_text="Also finds incidents of a machine or device that name it in their evidence."
    )
    severity = filters.ChoiceFilter(choices=choices(Severity), method="filter_severity")
    owner = filters.CharFilter(help_text="User who works on it.")
    acknowledged = filters.BooleanFilter(field_name="acknowledged_at", lookup_expr="isnull", exclude=True)
    since = filters.IsoDateTimeFilter(field_name="opened_at", lookup_expr="gte", help_text="Opened at or after.")
    until = filters.IsoDateTimeFilter(field_name="opened_at", lookup_expr="lt", help_text="Opened before.")

    def filter_node(self, rows: QuerySet[Incident], name: str, value: str) -> QuerySet[Incident]:
        part = Exists(_parts(PartNoun.NODE, value))
        return rows.filter(Q(node=value) | Q(part) | Q(node="", evidence__nodes__contains=value))

    def filter_cell(self, rows: QuerySet[Incident], name: str, value: str) -> QuerySet[Incident]:
        return rows.filter(Q(cell=value) | Q(Exists(_parts(PartNoun.CELL, value))))

    def filter_severity(self, rows: QuerySet[Incident], name: str, value: str) -> QuerySet[Incident]:
        if value == Severity.INFO:
            return rows.filter(shadow=True)
        ranked = {Severity.CRITICAL: Q(kind__in=CRITICAL), Severity.MINOR: Q(kind__in=MINOR)}
        return rows.filter(ranked.get(Severity(value), ~Q(kind__in=CRITICAL | MINOR)), shadow=False)


def _parts(noun: PartNoun, name: str) -> QuerySet[IncidentPart]:
    return IncidentPart.objects.filter(incident=OuterRef("pk"), noun=noun.value, name=name)


class AssignSerializer(WhySerializer):
    owner = serializers.CharField(
        allow_blank=True, max_length=64, help_text="A user's name; empty releases the incident."
    )


class NoteSerializer(StrictSerializer):
    text = serializers.CharField(max_length=NOTE_MAX, help_text="Plain text, shown with your name and the time.")


class IncidentViewSet(ReadOnlyModelViewSet[Incident]):
    """Faults, newest first."""

    queryset = Incident.objects.prefetch_related("replacements", "parts", "notes")
    serializer_class = IncidentSerializer
    filterset_class = IncidentFilter
    lookup_value_regex = r"[0-9]+"
    page_order = "-id"
    ordering_fields = ("id", "kind", "state", "region", "deployment", "opened_at", "closed_at")
    watch_kind = "incident"
    measured = frozenset({"seen_at", "evidence"})
    aliases = ("inc",)
    columns = "ID, STATE, SEVERITY, KIND, SUBJECT, OWNER, OPENED=opened_at:age, SUMMARY"

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def dismiss(self, request: Request, id: str) -> Response:
        """Closes an incident that needs no repair, and settles its evidence. The same fault opens no incident and
        replaces nothing for an hour, unless there is new evidence. 409 if the incident is closed."""
        return self.act_on_object(request, incident_dismiss, "incident_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def acknowledge(self, request: Request, id: str) -> Response:
        """Records that you have seen an open incident, and makes you its owner unless it has one. 409 if it is closed
        or acknowledged."""
        return self.act_on_object(request, incident_acknowledge, "incident_id")

    @extend_schema(request=AssignSerializer)
    @action(detail=True, methods=["post"])
    def assign(self, request: Request, id: str) -> Response:
        """Makes a user the owner. 400 if there is no such user."""
        return self.act_on_object(request, incident_assign, "incident_id", AssignSerializer)

    @extend_schema(request=NoteSerializer)
    @action(detail=True, methods=["post"])
    def note(self, request: Request, id: str) -> Response:
        """Adds a note. Notes stay with the incident and appear in its story and report."""
        return self.act_on_object(request, incident_note_add, "incident_id", NoteSerializer)


RULES = [(rule.value, rule.value.replace("_", " ").capitalize()) for rule in SETTABLE_RULES]


class FaultRuleSerializer(serializers.ModelSerializer[FaultRule]):
    rule = serializers.ChoiceField(choices=RULES)
    mode = serializers.ChoiceField(
        choices=choices(RuleMode), help_text="`shadow`: reports what it would do, changes nothing."
    )
    actor = serializers.CharField(help_text="The user who set it; empty for the default.")
    changed_at = serializers.DateTimeField(allow_null=True)

    class Meta:
        model = FaultRule
        fields = ["rule", "mode", "actor", "changed_at"]


class SetModeSerializer(WhySerializer):
    mode = serializers.ChoiceField(choices=choices(RuleMode))


class FaultRuleFilter(filters.FilterSet):
    mode = filters.ChoiceFilter(choices=choices(RuleMode))


class FaultRuleViewSet(ReadOnlyModelViewSet[FaultRule]):
    """Rules that may replace machines without an operator. Lists those whose mode was set; all others are on."""

    queryset = FaultRule.objects.all()
    serializer_class = FaultRuleSerializer
    filterset_class = FaultRuleFilter
    lookup_field = "rule"
    lookup_url_kwarg = "name"
    lookup_value_regex = r"[a-z_]+"
    page_order = "rule"
    needs = {"partial_update": Role.ADMIN}
    ordering_fields = ("rule", "mode", "changed_at")
    watch_kind = "fault-rule"
    aliases = ("rules",)
    columns = "RULE, MODE, ACTOR, CHANGED=changed_at:age"

    def get_object(self) -> FaultRule:
        name = self.kwargs["name"]
        if name not in SETTABLE_RULES:
            raise Http404
        return FaultRule.objects.filter(rule=name).first() or FaultRule(rule=name, mode=RuleMode.ON)

    @extend_schema(operation_id="fault_rules_set", request=SetModeSerializer)
    def partial_update(self, request: Request, name: str) -> Response:
        """Sets a rule's mode to `off`, `shadow` or `on`."""
        chosen = self.get_object()
        payload = body_of(request, SetModeSerializer)
        fault_rule_set(
            rule=Rule(chosen.rule),
            mode=RuleMode(payload["mode"]),
            actor=actor_of(request),
            now=clock.now(),
            why=payload["why"],
        )
        return Response(self.get_serializer(self.get_object()).data)


ROUTES = (
    ("incidents", IncidentViewSet, "incident"),
    ("fault-rules", FaultRuleViewSet, "fault-rule"),
)
