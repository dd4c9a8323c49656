"""Budgets of tenants over HTTP: what each may use of a month, how much it has, and whether it is stopped. Decides
nothing; services do."""

from decimal import Decimal

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.api import money_examples
from traffic.api.key import TENANT
from traffic.models import Budget
from traffic.planning.budget import MOST_PERCENT, MOST_THRESHOLDS, MonthUse, month_of, used_percent
from traffic.planning.usage_table import money_text
from traffic.selectors.budget import budgets_described
from traffic.services.budget import budget_change, budget_create, budget_delete

MOST_TOKENS = 2**53


@extend_schema_serializer(examples=[OpenApiExample("budget", money_examples.BUDGET, response_only=True)])
class BudgetSerializer(serializers.ModelSerializer[Budget]):
    tokens_per_month = serializers.IntegerField(allow_null=True, help_text="Prompt and completion; null: no limit.")
    money_per_month = serializers.DecimalField(
        max_digits=16, decimal_places=6, allow_null=True, help_text="US dollars by prices of tokens; null: no limit."
    )
    thresholds = serializers.ListField(child=serializers.IntegerField(), help_text="Per cent; each opens an incident.")
    hard_stop = serializers.BooleanField(help_text="At 100 % the tenant's keys are refused until the next month.")
    month = serializers.SerializerMethodField(help_text="The month (UTC) that counts now.")
    used_tokens = serializers.IntegerField(default=0)
    used_money = serializers.SerializerMethodField()
    used_percent = serializers.SerializerMethodField(help_text="Of the limit that is nearer.")
    level = serializers.IntegerField(help_text="The threshold that was reached; 0: none.")
    stopped = serializers.BooleanField(help_text="Its keys are refused with 429 `insufficient_quota`.")

    class Meta:
        model = Budget
        fields = [
            "tenant", "tokens_per_month", "money_per_month", "thresholds", "hard_stop", "month", "used_tokens",
            "used_money", "used_percent", "level", "stopped", "stopped_at", "actor", "changed_at",
        ]  # fmt: skip

    def get_month(self, row: Budget) -> str:
        return f"{month_of(clock.now()):%Y-%m}"

    def get_used_money(self, row: Budget) -> str:
        return money_text(getattr(row, "used_money", Decimal(0)))

    def get_used_percent(self, row: Budget) -> float:
        use = MonthUse(getattr(row, "used_tokens", 0), getattr(row, "used_money", Decimal(0)))
        return round(float(used_percent(row.rules(), use)), 1)


class ChangeBudgetSerializer(StrictSerializer):
    tokens_per_month = serializers.IntegerField(min_value=1, max_value=MOST_TOKENS, required=False, allow_null=True)
    money_per_month = serializers.DecimalField(
        max_digits=16, decimal_places=6, required=False, allow_null=True, help_text="US dollars, more than 0."
    )
    thresholds = serializers.ListField(
        child=serializers.IntegerField(min_value=1, max_value=MOST_PERCENT),
        max_length=MOST_THRESHOLDS,
        required=False,
        help_text="Rising whole per cents; 50, 80 and 100.",
    )
    hard_stop = serializers.BooleanField(required=False)


@extend_schema_serializer(examples=[OpenApiExample("a budget", money_examples.NEW_BUDGET, request_only=True)])
class CreateBudgetSerializer(ChangeBudgetSerializer):
    tenant = serializers.RegexField(TENANT, help_text="As its keys name it.")


class BudgetFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    stopped = filters.BooleanFilter()

    class Meta:
        model = Budget
        fields: list[str] = []


class BudgetViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Budget]):
    """What tenants may use of each month (UTC): tokens, US dollars or both. What is nearer to its limit counts."""

    serializer_class = BudgetSerializer
    filterset_class = BudgetFilter
    lookup_field = "tenant"
    lookup_url_kwarg = "id"
    lookup_value_regex = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
    page_order = "tenant"
    needs = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("tenant", "changed_at")
    measured = frozenset({"month", "used_tokens", "used_money", "used_percent", "level", "stopped", "stopped_at"})

    def get_queryset(self) -> QuerySet[Budget]:
        return budgets_described(clock.now())

    @extend_schema(operation_id="budgets_create", request=CreateBudgetSerializer, responses={200: BudgetSerializer})
    def create(self, request: Request) -> Response:
        """Give a tenant a budget. 409 if it has one."""
        body = CreateBudgetSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = budget_create(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(BudgetSerializer(self.get_queryset().get(pk=row.pk)).data)

    @extend_schema(operation_id="budgets_change", request=ChangeBudgetSerializer, responses={200: BudgetSerializer})
    def partial_update(self, request: Request, id: str) -> Response:
        """Change what is given. A higher budget lifts a stop within seconds."""
        row = self.get_object()
        body = ChangeBudgetSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        budget_change(tenant=row.tenant, actor=actor_of(request), now=clock.now(), **body.validated_data)
        return Response(BudgetSerializer(self.get_object()).data)

    @extend_schema(operation_id="budgets_delete", responses={200: BudgetSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Remove a tenant's budget: nothing stops it any more. Responds with what it was."""
        row = self.get_object()
        shown = BudgetSerializer(row).data
        budget_delete(tenant=row.tenant, actor=actor_of(request), now=clock.now())
        return Response(shown)
