"""Two-person approval over HTTP: requests, and the rules that require it."""

from django.http import Http404
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.tokens import TONES
from accounts.models import APPROVAL_STATES, Approval, ApprovalRule
from accounts.permissions import require_fresh_factor, require_human, require_may_reject
from accounts.services.approval import approval_approve, approval_reject, approval_rule_set, fleet_actions
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import ReadOnlyModelViewSet


class ApprovalSerializer(serializers.ModelSerializer[Approval]):
    arguments = serializers.DictField(help_text="The arguments of the action.")
    tone = serializers.ChoiceField(choices=TONES)
    outcome = serializers.CharField(help_text="The outcome.")

    class Meta:
        model = Approval
        fields = [
            "id", "action", "summary", "arguments", "deployment", "region", "why", "state", "tone", "requested_by",
            "requested_at", "expires_at", "decided_by", "decided_at", "outcome",
        ]  # fmt: skip
        examples = {
            "summary": "evacuation of us-east-1 (all deployments)",
            "arguments": {"region": "us-east-1", "deployment": "", "duration_s": 3600, "why": "fire"},
        }


class ApprovalRuleSerializer(serializers.ModelSerializer[ApprovalRule]):
    action = serializers.CharField()
    title = serializers.SerializerMethodField()
    required = serializers.BooleanField(  # type: ignore[assignment] # a serializer takes its fields away
        help_text="Whether it needs two-person approval."
    )
    actor = serializers.CharField(help_text="Who set it; empty for the default.")
    changed_at = serializers.DateTimeField(allow_null=True)

    class Meta:
        model = ApprovalRule
        fields = ["action", "title", "required", "actor", "changed_at"]
        examples = {"title": "Evacuate a region for real"}

    def get_title(self, rule: ApprovalRule) -> str:
        return next((known.title for known in fleet_actions() if known.name == rule.action), rule.action)


class SetRuleSerializer(StrictSerializer):
    required = serializers.BooleanField()  # type: ignore[assignment] # a serializer takes its fields away


class ApprovalFilter(filters.FilterSet):
    state = filters.MultipleChoiceFilter(choices=APPROVAL_STATES, distinct=False, help_text="May be repeated.")
    action = filters.CharFilter()
    requested_by = filters.CharFilter()


class ApprovalViewSet(ReadOnlyModelViewSet[Approval]):
    """Requests for two-person approval, with outcomes. An action that needs approval responds 202 with one."""

    queryset = Approval.objects.all()
    serializer_class = ApprovalSerializer
    filterset_class = ApprovalFilter
    page_order = "-id"
    ordering_fields = ("id", "state", "action")
    needs = {"approve": Role.ADMIN, "reject": Role.VIEWER}
    columns = "ID, STATE, ACTION, SUMMARY, BY=requested_by, ASKED=requested_at:age"

    @action(detail=True, methods=["post"])
    def approve(self, request: Request, id: str) -> Response:
        """Approve another user's request; its action runs immediately. 409 for your own request or a decided one. 403
        for users with a second factor, except in a browser where they showed it within the last 10 minutes."""
        require_human(request)
        require_fresh_factor(request, clock.now())
        row = approval_approve(approval_id=self.get_object().pk, actor=actor_of(request), now=clock.now())
        return Response(ApprovalSerializer(row).data)

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def reject(self, request: Request, id: str) -> Response:
        """Reject a request, or withdraw your own. 409 if it is decided."""
        row = self.get_object()
        require_may_reject(request, row)
        why = body_of(request, WhySerializer)["why"]
        row = approval_reject(approval_id=row.pk, actor=actor_of(request), now=clock.now(), why=why)
        return Response(ApprovalSerializer(row).data)


class ApprovalRuleViewSet(ReadOnlyModelViewSet[ApprovalRule]):
    """Actions that need two-person approval. The list has the rules that were set; other actions need none."""

    queryset = ApprovalRule.objects.all()
    serializer_class = ApprovalRuleSerializer
    lookup_field = "action"
    lookup_url_kwarg = "name"
    lookup_value_regex = r"[a-z-]+"
    page_order = "action"
    needs = {"partial_update": Role.ADMIN}

    def get_object(self) -> ApprovalRule:
        name = self.kwargs["name"]
        if name not in {known.name for known in fleet_actions()}:
            raise Http404
        return ApprovalRule.objects.filter(action=name).first() or ApprovalRule(action=name, required=False)

    @extend_schema(
        operation_id="approval_rules_set",
        request=SetRuleSerializer,
        responses={200: ApprovalRuleSerializer, 202: ApprovalSerializer},
    )
    def partial_update(self, request: Request, name: str) -> Response:
        """Require two-person approval. Removing the requirement needs approval: 202 with the request."""
        self.get_object()
        required = body_of(request, SetRuleSerializer)["required"]
        row = approval_rule_set(name=name, required=required, actor=actor_of(request), now=clock.now())
        if isinstance(row, Approval):
            return waiting(row)
        return Response(ApprovalRuleSerializer(row).data)


def waiting(row: Approval) -> Response:
    """The response to an action that needs approval: 202, and the request that another admin has to approve."""
    return Response(ApprovalSerializer(row).data, status=202)


ROUTES = (
    ("approvals", ApprovalViewSet, "approval"),
    ("approval-rules", ApprovalRuleViewSet, "approval-rule"),
)
