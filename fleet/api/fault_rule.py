"""Rules about faults over HTTP: read their modes, set one. Decides nothing; services do."""

from django.db.models import QuerySet
from django.http import Http404
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.models import FaultRule
from fleet.planning.fault_rules import SETTABLE_RULES, Rule, RuleMode
from fleet.planning.states import choices
from fleet.services.fault_rule import fault_rule_set
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import WhySerializer, actor_of
from kernel.rest.view_sets import ReadOnlyModelViewSet

RULES = [(rule.value, rule.value.replace("_", " ").capitalize()) for rule in SETTABLE_RULES]


class FaultRuleSerializer(serializers.ModelSerializer[FaultRule]):
    rule = serializers.ChoiceField(choices=RULES)
    mode = serializers.ChoiceField(
        choices=choices(RuleMode), help_text="`shadow`: report what it would do, do nothing."
    )
    actor = serializers.CharField(help_text="Who set it; empty for the default.")
    changed_at = serializers.DateTimeField(allow_null=True)

    class Meta:
        model = FaultRule
        fields = ["rule", "mode", "actor", "changed_at"]


class SetModeSerializer(WhySerializer):
    mode = serializers.ChoiceField(choices=choices(RuleMode))


class FaultRuleFilter(filters.FilterSet):
    mode = filters.ChoiceFilter(choices=choices(RuleMode))

    class Meta:
        model = FaultRule
        fields: list[str] = []


class FaultRuleViewSet(ReadOnlyModelViewSet[FaultRule]):
    """Which rules may replace machines without an operator. The list has those whose mode was set; others are on."""

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

    def get_queryset(self) -> QuerySet[FaultRule]:
        return FaultRule.objects.all()

    def get_object(self) -> FaultRule:
        name = self.kwargs["name"]
        if name not in SETTABLE_RULES:
            raise Http404
        return FaultRule.objects.filter(rule=name).first() or FaultRule(rule=name, mode=RuleMode.ON)

    @extend_schema(operation_id="fault_rules_set", request=SetModeSerializer, responses={200: FaultRuleSerializer})
    def partial_update(self, request: Request, name: str) -> Response:
        """Set a rule's mode: `off`, `shadow` or `on`."""
        chosen = self.get_object()
        payload = SetModeSerializer(data=request.data)
        payload.is_valid(raise_exception=True)
        fault_rule_set(
            rule=Rule(chosen.rule),
            mode=RuleMode(payload.validated_data["mode"]),
            actor=actor_of(request),
            now=clock.now(),
            why=payload.validated_data["why"],
        )
        return Response(self.get_serializer(self.get_object()).data)
