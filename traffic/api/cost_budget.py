"""Budgets of what machines may cost over HTTP: by deployment or of the fleet, and how much of this month's is used.
Decides nothing; services do."""

from decimal import Decimal
from functools import cached_property
from typing import Any

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
from traffic.models import CostBudget
from traffic.planning.budget import MOST_PERCENT, MOST_THRESHOLDS, MonthUse, month_of, used_percent
from traffic.planning.usage_table import money_text
from traffic.selectors.cost import month_costs
from traffic.services.cost_budget import cost_budget_change, cost_budget_create, cost_budget_delete


class MonthCosts:
    """What machines cost this month, by deployment and in all; read once for a response."""

    @cached_property
    def by_deployment(self) -> dict[str, Decimal]:
        now = clock.now()
        return month_costs(month_of(now), now)


@extend_schema_serializer(examples=[OpenApiExample("cost budget", money_examples.COST_BUDGET, response_only=True)])
class CostBudgetSerializer(serializers.ModelSerializer[CostBudget]):
    deployment = serializers.CharField(help_text="Empty: all machines, spares included.")
    thresholds = serializers.ListField(child=serializers.IntegerField(), help_text="Per cent; each opens an incident.")
    used_usd = serializers.SerializerMethodField(
        help_text="US dollars of this month (UTC), the hour that runs included."
    )
    used_percent = serializers.SerializerMethodField()
    level = serializers.IntegerField(help_text="The threshold that was reached; 0: none.")

    class Meta:
        model = CostBudget
        fields = [
            "id", "deployment", "money_per_month", "thresholds", "used_usd", "used_percent", "level", "actor",
            "changed_at",
        ]  # fmt: skip

    def get_used_usd(self, row: CostBudget) -> str:
        return money_text(self._used(row))

    def get_used_percent(self, row: CostBudget) -> float:
        return round(float(used_percent(row.rules(), MonthUse(money=self._used(row)))), 1)

    def _used(self, row: CostBudget) -> Decimal:
        costs: MonthCosts = self.context["month_costs"]
        return costs.by_deployment.get(row.deployment, Decimal(0))


def _thresholds() -> serializers.ListField:
    child = serializers.IntegerField(min_value=1, max_value=MOST_PERCENT)
    what = "Rising whole per cents; 50, 80 and 100."
    return serializers.ListField(child=child, max_length=MOST_THRESHOLDS, required=False, help_text=what)


class ChangeCostBudgetSerializer(StrictSerializer):
    money_per_month = serializers.DecimalField(
        max_digits=16, decimal_places=6, required=False, help_text="US dollars, more than 0."
    )
    thresholds = _thresholds()


@extend_schema_serializer(examples=[OpenApiExample("a cost budget", money_examples.NEW_COST_BUDGET, request_only=True)])
class CreateCostBudgetSerializer(StrictSerializer):
    deployment = serializers.CharField(
        max_length=96,
        required=False,
        allow_blank=True,
        default="",
        help_text="Left out or empty: all machines, spares included.",
    )
    money_per_month = serializers.DecimalField(max_digits=16, decimal_places=6, help_text="US dollars, more than 0.")
    thresholds = _thresholds()


class CostBudgetFilter(filters.FilterSet):
    deployment = filters.CharFilter()

    class Meta:
        model = CostBudget
        fields: list[str] = []


class CostBudgetViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[CostBudget]):
    """What machines may cost each month (UTC). It alerts, by an incident at each threshold, and stops nothing."""

    serializer_class = CostBudgetSerializer
    filterset_class = CostBudgetFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    needs = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "deployment", "changed_at")
    measured = frozenset({"used_usd", "used_percent", "level"})

    def get_queryset(self) -> QuerySet[CostBudget]:
        return CostBudget.objects.all()

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "month_costs": MonthCosts()}

    @extend_schema(
        operation_id="cost_budgets_create", request=CreateCostBudgetSerializer, responses={200: CostBudgetSerializer}
    )
    def create(self, request: Request) -> Response:
        """Give a deployment, or the fleet, a budget. 409 if it has one."""
        body = CreateCostBudgetSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = cost_budget_create(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    @extend_schema(
        operation_id="cost_budgets_change", request=ChangeCostBudgetSerializer, responses={200: CostBudgetSerializer}
    )
    def partial_update(self, request: Request, id: str) -> Response:
        """Change what is given."""
        row = self.get_object()
        body = ChangeCostBudgetSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        cost_budget_change(budget_id=row.pk, actor=actor_of(request), now=clock.now(), **body.validated_data)
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(operation_id="cost_budgets_delete", responses={200: CostBudgetSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Remove a budget. Responds with what it was."""
        row = self.get_object()
        shown = self.get_serializer(row).data
        cost_budget_delete(budget_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)
