"""Budgets over HTTP: monthly limits on the use of tenants and on the cost of machines, with the part that is used.
Decides nothing; services do."""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.api.key import TENANT
from traffic.models import Budget
from traffic.planning.budget import MOST_ALERTS, MOST_PERCENT, BudgetUnit, used_percent
from traffic.planning.usage_table import money_text
from traffic.selectors.budget import MonthUse
from traffic.services.budget import budget_change, budget_create, budget_delete

UNITS = [unit.value for unit in BudgetUnit]
OF_MACHINES = "Of machines; with neither tenant nor deployment: of all machines, spares included."


class BudgetSerializer(serializers.ModelSerializer[Budget]):
    tenant = serializers.CharField(help_text="Empty for a budget of machines.")
    deployment = serializers.CharField(help_text=OF_MACHINES)
    unit = serializers.ChoiceField(
        choices=UNITS, help_text="`usd`: of a tenant by prices of tokens, of machines what they cost."
    )
    limit = serializers.DecimalField(max_digits=22, decimal_places=6, help_text="Each month (UTC).")
    alert_at = serializers.ListField(child=serializers.IntegerField(), help_text="Per cent; each opens an incident.")
    hard_stop = serializers.BooleanField(help_text="At 100 % the tenant's keys are refused until the next month.")
    month = serializers.SerializerMethodField(help_text="The month (UTC) that counts now.")
    used = serializers.SerializerMethodField(help_text="Of machines: the hour that runs included.")
    used_percent = serializers.SerializerMethodField()
    level = serializers.IntegerField(help_text="Of `alert_at`, the one that was reached; 0: none.")
    stopped = serializers.BooleanField(help_text="The tenant's keys are refused with 429 `insufficient_quota`.")

    class Meta:
        model = Budget
        fields = [
            "id", "tenant", "deployment", "unit", "limit", "alert_at", "hard_stop", "month", "used", "used_percent",
            "level", "stopped", "stopped_at", "actor", "changed_at",
        ]  # fmt: skip
        examples = {"month": "2026-11", "used": "842.120000"}

    @property
    def _use(self) -> MonthUse:
        use: MonthUse = self.context["month_use"]
        return use

    def get_month(self, row: Budget) -> str:
        return f"{self._use.month:%Y-%m}"

    def get_used(self, row: Budget) -> str:
        return money_text(self._use.of(row))

    def get_used_percent(self, row: Budget) -> float:
        return round(float(used_percent(row.rules(), self._use.of(row))), 1)


class ChangeBudgetSerializer(StrictSerializer):
    limit = serializers.DecimalField(max_digits=22, decimal_places=6, required=False, help_text="More than 0.")
    alert_at = serializers.ListField(
        child=serializers.IntegerField(min_value=1, max_value=MOST_PERCENT),
        max_length=MOST_ALERTS,
        required=False,
        help_text="Rising whole per cents; 50, 80 and 100.",
    )
    hard_stop = serializers.BooleanField(required=False, help_text="Only of a tenant.")


class CreateBudgetSerializer(ChangeBudgetSerializer):
    tenant = serializers.RegexField(
        TENANT, required=False, allow_blank=True, default="", help_text="As its keys name it."
    )
    deployment = serializers.CharField(
        max_length=96, required=False, allow_blank=True, default="", help_text=OF_MACHINES
    )
    unit = serializers.ChoiceField(choices=UNITS, help_text="`tokens`: only of a tenant.")
    limit = serializers.DecimalField(max_digits=22, decimal_places=6, help_text="Each month (UTC); more than 0.")

    class Meta:
        examples = {"tenant": "rufus", "unit": "usd", "limit": "1200.00", "hard_stop": True}


class BudgetFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    deployment = filters.CharFilter()
    unit = filters.ChoiceFilter(choices=[(unit, unit) for unit in UNITS])
    stopped = filters.BooleanFilter()

    class Meta:
        model = Budget
        fields: list[str] = []


class BudgetViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Budget]):
    """Monthly limits (UTC) on the tokens or US dollars that a tenant uses, and on the cost of machines. Each alert
    opens an incident."""

    serializer_class = BudgetSerializer
    filterset_class = BudgetFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    needs = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "tenant", "deployment", "changed_at")
    measured = frozenset({"month", "used", "used_percent", "level", "stopped", "stopped_at"})
    columns = "ID, TENANT, DEPLOYMENT, UNIT, LIMIT, USED=used:number, USED %=used_percent, HARD STOP, STOPPED"

    def get_queryset(self) -> QuerySet[Budget]:
        return Budget.objects.all()

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "month_use": MonthUse(clock.now())}

    @extend_schema(operation_id="budgets_create", request=CreateBudgetSerializer, responses={200: BudgetSerializer})
    def create(self, request: Request) -> Response:
        """Give a tenant, a deployment's machines or the fleet a budget. 409 if there is one in this unit."""
        body = CreateBudgetSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = budget_create(**body.validated_data, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    @extend_schema(operation_id="budgets_change", request=ChangeBudgetSerializer, responses={200: BudgetSerializer})
    def partial_update(self, request: Request, id: str) -> Response:
        """Change what is given. A higher limit lifts a stop within seconds."""
        row = self.get_object()
        body = ChangeBudgetSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        budget_change(budget_id=row.pk, actor=actor_of(request), now=clock.now(), **body.validated_data)
        return Response(self.get_serializer(self.get_object()).data)

    @extend_schema(operation_id="budgets_delete", responses={200: BudgetSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Delete a budget and lift its stop. Responds with what it was."""
        row = self.get_object()
        shown = self.get_serializer(row).data
        budget_delete(budget_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)
