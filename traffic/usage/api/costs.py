"""Costs, energy and emissions of machines over HTTP, in total and per million tokens, as JSON, CSV or Parquet; and
budgets. Decides nothing; selectors and services do."""

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.capacity.planning.rates import Source
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from traffic.keys.api import TENANT
from traffic.keys.models import ApplicationKey
from traffic.usage.api.usage import (
    DEFAULT_ROWS,
    TablesViewSet,
    download,
    form_of,
    given_once,
    limit_of,
    parsed_query,
    table_parameters,
)
from traffic.usage.models import Budget
from traffic.usage.planning.counting import MOST_ALERTS, MOST_PERCENT, BudgetUnit, used_percent
from traffic.usage.planning.figures import (
    COST_COLUMNS,
    COST_DIMENSIONS,
    TOKEN_COLUMNS,
    By,
    CostRow,
    UsageQuery,
    csv_pieces,
    micro_text,
    money_text,
)
from traffic.usage.selectors.budgets import MonthUse
from traffic.usage.selectors.costs import batch_price, cost_answer, cost_rows
from traffic.usage.selectors.weights import TokenWeight, token_weights
from traffic.usage.services.budgets import budget_change, budget_create, budget_delete
from traffic.usage.services.export import PARQUET_TYPE, TooManyRows, cost_parquet

SOURCES = [(source.label, source.label) for source in Source]
DEFAULT_GROUP = "version,type"
HOUR_MS = 3_600_000
_WITHOUT = "null in rows of tenants, classes or adapters, which idle time does not have."


def _amount_field(what: str, **more: Any) -> serializers.CharField:
    return serializers.CharField(help_text=what, **more)


def _figure_field(what: str) -> serializers.FloatField:
    return serializers.FloatField(allow_null=True, help_text=f"{what}; null if unknown or without tokens.")


def _source_field() -> serializers.ChoiceField:
    return serializers.ChoiceField(choices=SOURCES)


class CostFiguresSerializer(serializers.Serializer[Any]):
    """Amounts are exact decimals as text; figures are per million prompt and completion tokens."""

    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(help_text="Part of `prompt_tokens`: found in the engine's cache.")
    completion_tokens = serializers.IntegerField()
    machine_hours = _amount_field(_WITHOUT, allow_null=True)
    cost_usd = _amount_field("US dollars caused by the tokens.")
    idle_cost_usd = _amount_field(f"US dollars of idle time; {_WITHOUT}", allow_null=True)
    energy_j = _amount_field("Joules.")
    idle_energy_j = _amount_field(_WITHOUT, allow_null=True)
    carbon_g = _amount_field("Grams of CO2 equivalent.")
    idle_carbon_g = _amount_field(_WITHOUT, allow_null=True)
    usd_per_mtoken = _figure_field("US dollars")
    joules_per_mtoken = _figure_field("Joules")
    gco2e_per_mtoken = _figure_field("Grams of CO2 equivalent")
    usd_per_mtoken_with_idle = _figure_field("The same with idle time")
    joules_per_mtoken_with_idle = _figure_field("The same with idle time")
    gco2e_per_mtoken_with_idle = _figure_field("The same with idle time")
    cost_source = _source_field()
    energy_source = _source_field()
    carbon_source = _source_field()


class CostGroupSerializer(CostFiguresSerializer):
    """One group. Dimensions that are not grouped by are null."""

    start = serializers.DateTimeField(allow_null=True, help_text="Start of its time; null with `by=total`.")
    deployment = serializers.CharField(allow_null=True)
    version = serializers.CharField(allow_null=True)
    region = serializers.CharField(allow_null=True)
    tenant = serializers.CharField(allow_null=True, help_text="Empty for requests without a key.")
    adapter = serializers.CharField(allow_null=True, help_text="Empty for the base model.")

    class Meta:
        examples = {"version": "sim-70b@1", "adapter": None}

    def get_fields(self) -> dict[str, Any]:
        own = {name: serializers.CharField(allow_null=True) for name in ("type", "class")}
        return {**super().get_fields(), **own}


class CostTotalsSerializer(CostFiguresSerializer):
    """Totals of the filtered rows. `cells_usd` = `cost_usd` + `idle_cost_usd`; `bill_usd` includes spares."""

    cells_usd = _amount_field(_WITHOUT, allow_null=True)
    spares_usd = _amount_field(
        "US dollars of machines in no cell; null where a filter leaves them out.", allow_null=True
    )
    spares_energy_j = _amount_field("Joules of the same.", allow_null=True)
    bill_usd = _amount_field("US dollars of all machines; null where a filter leaves some out.", allow_null=True)
    open_machine_hours = serializers.FloatField(help_text="Of unsettled hours, which are in no sum.")
    refused_readings = serializers.IntegerField(
        allow_null=True, help_text="Implausible meter readings; their time is estimated."
    )
    measured_percent = serializers.FloatField(
        allow_null=True, help_text="Metered share of the cells' energy; null if unknown."
    )


class TokenWeightSerializer(serializers.Serializer[Any]):
    """Token weights of a version on an instance type for splitting hours; a computed prompt token weighs 1."""

    version = serializers.CharField()
    type = serializers.CharField()
    cached = serializers.FloatField(help_text="Weight of a prompt token from the engine's cache.")
    completion = serializers.FloatField()
    known = serializers.ChoiceField(
        choices=SOURCES,
        help_text="`measured` from engine steps, `rated` from token prices, `estimated` from price lists.",
    )
    samples = serializers.IntegerField(allow_null=True, help_text="Fitted samples of 15 s; null if not measured.")
    nodes = serializers.IntegerField(allow_null=True)
    error_percent = serializers.FloatField(
        allow_null=True, help_text="Share of busy time that the model does not explain."
    )
    weight_error_percent = serializers.FloatField(allow_null=True, help_text="The standard error of `completion`.")
    bounded = serializers.BooleanField(help_text="Whether it was limited to 30 times the price lists.")
    fitted_at = serializers.DateTimeField(allow_null=True)

    class Meta:
        examples = {"version": "sim-70b@1"}


class BatchPriceSerializer(serializers.Serializer[Any]):
    """Cost of batches: their share, and the price of a million additional tokens, from comparing hours."""

    tokens = serializers.IntegerField()
    cost_usd = _amount_field("US dollars: their share.")
    usd_per_mtoken = _figure_field("US dollars, by their share")
    marginal_usd_per_mtoken = serializers.FloatField(allow_null=True, help_text="Null if hours do not determine it.")
    marginal_usd_error = serializers.FloatField(allow_null=True, help_text="Its standard error.")
    marginal_joules_per_mtoken = serializers.FloatField(allow_null=True)
    hours = serializers.IntegerField(allow_null=True, help_text="Hours that were compared.")


@extend_schema_serializer(many=False)
class CostSerializer(serializers.Serializer[Any]):
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    by = serializers.ChoiceField(choices=[(by.value, by.value) for by in By])
    group = serializers.ListField(child=serializers.CharField())
    rows = CostGroupSerializer(many=True)
    totals = CostTotalsSerializer()
    truncated = serializers.BooleanField(help_text="Whether there are more groups than `limit`.")
    batches = BatchPriceSerializer(
        allow_null=True, help_text="Null without batches in these hours, or with a filter of accounts."
    )
    weights = TokenWeightSerializer(many=True)

    class Meta:
        examples = {"group": ["version", "type"]}


class CostViewSet(TablesViewSet):
    """Cost, energy and emissions of machines in settled hours. Accounts are kept for 90 days by hour, then 400 by
    day."""

    @extend_schema(
        parameters=table_parameters(COST_DIMENSIONS, DEFAULT_GROUP),
        responses={
            ("200", "application/json"): CostSerializer,
            ("200", "text/csv"): str,
            ("200", PARQUET_TYPE): bytes,
        },
        filters=False,
    )
    def list(self, request: Request) -> HttpResponseBase:
        """Costs by group, latest first, with totals: tenants + idle = cells; cells + spares = bill."""
        given = given_once(request, (*COST_DIMENSIONS, "from", "to", "by", "group", "limit", "as"))
        form, limit = form_of(given.pop("as", "json")), limit_of(given.pop("limit", str(DEFAULT_ROWS)))
        query = parsed_query(given, clock.now(), COST_DIMENSIONS, DEFAULT_GROUP)
        if form == "csv":
            pieces = csv_pieces(cost_rows(query), COST_COLUMNS)
            return download("costs", pieces, "text/csv; charset=utf-8", query, form)
        if form == "parquet":
            return download("costs", iter([_costs_parquet(cost_rows(query))]), PARQUET_TYPE, query, form)
        answer = cost_answer(query, most=limit)
        totals, spares = answer.totals, answer.spares
        cells = totals.sums.cells_cost if totals.has_idle else None
        energy = totals.sums.cells_uj
        return Response(
            {
                "start": query.start,
                "end": query.end,
                "by": query.by.value,
                "group": list(query.group),
                "rows": [_cost_row_json(row) for row in answer.rows],
                "totals": {
                    **_cost_figures(totals),
                    "cells_usd": None if cells is None else money_text(cells),
                    "spares_usd": None if spares is None else money_text(spares.idle_cost),
                    "spares_energy_j": None if spares is None else micro_text(spares.idle_uj),
                    "bill_usd": None if cells is None or spares is None else money_text(cells + spares.idle_cost),
                    "open_machine_hours": round(answer.open_ms / HOUR_MS, 3),
                    "refused_readings": totals.sums.refused if totals.has_idle else None,
                    "measured_percent": round(100 * totals.sums.measured_uj / energy, 1)
                    if totals.has_idle and energy
                    else None,
                },
                "truncated": answer.truncated,
                "batches": _batch_price_json(query),
                "weights": [_token_weight_json(each) for each in token_weights(clock.now())],
            }
        )


def _costs_parquet(rows: Any) -> bytes:
    try:
        return cost_parquet(rows)
    except TooManyRows as error:
        raise ValidationError({"from": [ErrorDetail(str(error), "range")]}) from error


def _batch_price_json(query: UsageQuery) -> dict[str, Any] | None:
    price = batch_price(query)
    if price is None:
        return None
    usd, joules = price.usd, price.joules
    return {
        "tokens": price.sums.tokens,
        "cost_usd": money_text(price.sums.cost),
        "usd_per_mtoken": None if price.average is None else round(float(price.average), 6),
        "marginal_usd_per_mtoken": None if usd is None else float(usd.value),
        "marginal_usd_error": None if usd is None else float(usd.error),
        "marginal_joules_per_mtoken": None if joules is None else float(joules.value),
        "hours": None if usd is None else usd.hours,
    }


def _token_weight_json(weight: TokenWeight) -> dict[str, Any]:
    fit = weight.fit
    return {
        "version": weight.version,
        "type": weight.instance_type,
        "cached": round(weight.cached, 4),
        "completion": round(weight.completion, 4),
        "known": weight.source.label,
        "samples": fit and fit.samples,
        "nodes": fit and fit.nodes,
        "error_percent": fit and round(100 * fit.error, 2),
        "weight_error_percent": fit and round(100 * fit.weight_error, 2),
        "bounded": fit is not None and fit.bounded,
        "fitted_at": fit and fit.fitted_at,
    }


def _cost_row_json(row: CostRow) -> dict[str, Any]:
    return {"start": row.start, **{name: row.group.get(name) for name in COST_DIMENSIONS}, **_cost_figures(row)}


def _cost_figures(row: CostRow) -> dict[str, Any]:
    figures = {name: None if value is None else round(float(value), 6) for name, value in row.all_figures().items()}
    tokens = {name: getattr(row.sums, name) for name in TOKEN_COLUMNS}
    return {**tokens, **row.amounts(), **figures, **row.sources()}


UNITS = [unit.value for unit in BudgetUnit]
OF_MACHINES = "Deployment of a machine budget; with neither tenant nor deployment, all machines including spares."


OF_KEY = (
    "Prefix of the key that it limits: the part between `sw_` and the second `_`. Keys that replace it by rotation "
    "share the budget, which names the first one."
)


class BudgetSerializer(serializers.ModelSerializer[Budget]):
    tenant = serializers.CharField(help_text="Empty for a budget of a key or of machines.")
    key = serializers.CharField(help_text=OF_KEY)
    deployment = serializers.CharField(help_text=OF_MACHINES)
    unit = serializers.ChoiceField(
        choices=UNITS, help_text="`usd`: charges for a tenant's tokens, or cost of machines."
    )
    limit = serializers.DecimalField(max_digits=22, decimal_places=6, help_text="Each month (UTC).")
    alert_at = serializers.ListField(
        child=serializers.IntegerField(), help_text="Alerts in per cent; each opens an incident."
    )
    hard_stop = serializers.BooleanField(
        help_text="At 100 %, refuse the key or the tenant's keys until the next month."
    )
    month = serializers.SerializerMethodField(help_text="Current month (UTC).")
    used = serializers.SerializerMethodField(help_text="For machines, including the current hour.")
    used_percent = serializers.SerializerMethodField()
    level = serializers.IntegerField(help_text="The reached alert of `alert_at`; 0 if none.")
    stopped = serializers.BooleanField(help_text="Whether requests are refused with 429 `insufficient_quota`.")

    class Meta:
        model = Budget
        fields = [
            "id", "tenant", "key", "deployment", "unit", "limit", "alert_at", "hard_stop", "month", "used",
            "used_percent", "level", "stopped", "stopped_at", "actor", "changed_at",
        ]  # fmt: skip
        examples = {"month": "2026-11", "used": "842.120000"}

    @property
    def _month_use(self) -> MonthUse:
        use: MonthUse = self.context["month_use"]
        return use

    def get_month(self, row: Budget) -> str:
        return f"{self._month_use.month:%Y-%m}"

    def get_used(self, row: Budget) -> str:
        return money_text(self._month_use.of(row))

    def get_used_percent(self, row: Budget) -> float:
        return round(float(used_percent(row.rules(), self._month_use.of(row))), 1)


class ChangeBudgetSerializer(StrictSerializer):
    limit = serializers.DecimalField(max_digits=22, decimal_places=6, required=False, help_text="More than 0.")
    alert_at = serializers.ListField(
        child=serializers.IntegerField(min_value=1, max_value=MOST_PERCENT),
        max_length=MOST_ALERTS,
        required=False,
        help_text="Rising whole per cents; 50, 80 and 100.",
    )
    hard_stop = serializers.BooleanField(required=False, help_text="Only for a tenant or key.")


class CreateBudgetSerializer(ChangeBudgetSerializer):
    tenant = serializers.RegexField(
        TENANT, required=False, allow_blank=True, default="", help_text="Tenant as in its keys."
    )
    key = serializers.CharField(max_length=16, required=False, allow_blank=True, default="", help_text=OF_KEY)
    deployment = serializers.CharField(
        max_length=96, required=False, allow_blank=True, default="", help_text=OF_MACHINES
    )
    unit = serializers.ChoiceField(choices=UNITS, help_text="`tokens` only for a tenant or key.")
    limit = serializers.DecimalField(max_digits=22, decimal_places=6, help_text="Limit per month (UTC); more than 0.")

    class Meta:
        examples = {"tenant": "rufus", "unit": "usd", "limit": "1200.00", "hard_stop": True}


class BudgetFilter(filters.FilterSet):
    tenant = filters.CharFilter()
    key = filters.CharFilter(method="of_key", help_text="Also finds the budget that a rotated key shares.")
    deployment = filters.CharFilter()
    unit = filters.ChoiceFilter(choices=[(unit, unit) for unit in UNITS])
    stopped = filters.BooleanFilter()

    def of_key(self, rows: QuerySet[Budget], name: str, prefix: str) -> QuerySet[Budget]:
        key = ApplicationKey.objects.filter(prefix=prefix).first()
        return rows.filter(key=key.budget_key if key else prefix)


class BudgetViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Budget]):
    """Monthly (UTC) limits on a tenant's tokens or US dollars, and on the cost of machines. Each alert opens an
    incident."""

    queryset = Budget.objects.all()
    serializer_class = BudgetSerializer
    filterset_class = BudgetFilter
    page_order = "id"
    needs = {"create": Role.ADMIN, "partial_update": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "tenant", "deployment", "changed_at")
    measured = frozenset({"month", "used", "used_percent", "level", "stopped", "stopped_at"})
    columns = "ID, TENANT, KEY, DEPLOYMENT, UNIT, LIMIT, USED=used:number, USED %=used_percent, HARD STOP, STOPPED"

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "month_use": MonthUse(clock.now())}

    @extend_schema(request=CreateBudgetSerializer)
    def create(self, request: Request) -> Response:
        """Create a budget for a tenant, a key, a deployment's machines or the fleet. Returns 409 if there is one in
        this unit."""
        body = body_of(request, CreateBudgetSerializer)
        row = budget_create(**body, actor=actor_of(request), now=clock.now())
        return Response(self.get_serializer(row).data)

    @extend_schema(request=ChangeBudgetSerializer)
    def partial_update(self, request: Request, id: str) -> Response:
        """Change the given fields. A higher limit lifts a stop within seconds."""
        return self.act_on_object(request, budget_change, "budget_id", ChangeBudgetSerializer)

    def destroy(self, request: Request, id: str) -> Response:
        """Delete a budget and lift its stop. Responds with the deleted budget."""
        return self.remove_object(request, budget_delete, "budget_id")


ROUTES = (
    ("costs", CostViewSet, "cost"),
    ("budgets", BudgetViewSet, "budget"),
)
