"""What machines cost, took and emitted, and what that is for a million tokens, over HTTP: by version, type, region,
deployment, tenant, class and time, as JSON or as a table for other programs."""

from typing import Any

from django.http import HttpResponseBase
from drf_spectacular.utils import extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.exceptions import ErrorDetail, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.planning.rate import Source
from kernel import clock
from traffic.api.tables import (
    DEFAULT_ROWS,
    TablesViewSet,
    download,
    form_of,
    given_once,
    limit_of,
    parsed_query,
    table_parameters,
)
from traffic.planning.cost_figures import COLUMNS, DIMENSIONS, TOKEN_COLUMNS, CostRow, micro_text
from traffic.planning.usage_query import By, UsageQuery
from traffic.planning.usage_table import csv_pieces, money_text
from traffic.selectors.batch_price import batch_price
from traffic.selectors.cost import cost_answer, cost_rows
from traffic.selectors.token_fit import TokenWeight, token_weights
from traffic.services.usage_export import PARQUET_TYPE, TooManyRows, cost_parquet

SOURCES = [(source.label, source.label) for source in Source]
DEFAULT_GROUP = "version,type"
HOUR_MS = 3_600_000
_WITHOUT = "null where rows are of tenants, classes or adapters, which idle time has none of."


def _amount(what: str, **more: Any) -> serializers.CharField:
    return serializers.CharField(help_text=what, **more)


def _figure(what: str) -> serializers.FloatField:
    return serializers.FloatField(allow_null=True, help_text=f"{what}; null: not known, or no tokens.")


def _source() -> serializers.ChoiceField:
    return serializers.ChoiceField(choices=SOURCES)


class CostFiguresSerializer(serializers.Serializer[Any]):
    """Amounts are exact, as text; figures are for a million prompt and completion tokens."""

    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(help_text="Part of `prompt_tokens`: found in the engine's cache.")
    completion_tokens = serializers.IntegerField()
    machine_hours = _amount(_WITHOUT, allow_null=True)
    cost_usd = _amount("US dollars: what the tokens caused.")
    idle_cost_usd = _amount(f"US dollars: of time in which a cell had nothing in flight; {_WITHOUT}", allow_null=True)
    energy_j = _amount("Joules.")
    idle_energy_j = _amount(_WITHOUT, allow_null=True)
    carbon_g = _amount("Grams of CO2 equivalent.")
    idle_carbon_g = _amount(_WITHOUT, allow_null=True)
    usd_per_mtoken = _figure("US dollars")
    joules_per_mtoken = _figure("Joules")
    gco2e_per_mtoken = _figure("Grams of CO2 equivalent")
    usd_per_mtoken_with_idle = _figure("The same with idle time")
    joules_per_mtoken_with_idle = _figure("The same with idle time")
    gco2e_per_mtoken_with_idle = _figure("The same with idle time")
    cost_source = _source()
    energy_source = _source()
    carbon_source = _source()


class CostGroupSerializer(CostFiguresSerializer):
    """One group. Dimensions by which it is not grouped are null."""

    start = serializers.DateTimeField(allow_null=True, help_text="When its time began; null with `by=total`.")
    deployment = serializers.CharField(allow_null=True)
    version = serializers.CharField(allow_null=True)
    region = serializers.CharField(allow_null=True)
    tenant = serializers.CharField(allow_null=True, help_text="Empty: requests without a key.")
    adapter = serializers.CharField(allow_null=True, help_text="Empty: the model itself.")

    class Meta:
        examples = {"version": "sim-70b@1", "adapter": None}

    def get_fields(self) -> dict[str, Any]:
        own = {name: serializers.CharField(allow_null=True) for name in ("type", "class")}
        return {**super().get_fields(), **own}


class CostTotalsSerializer(CostFiguresSerializer):
    """Of everything that the filters take. `cells_usd` = `cost_usd` + `idle_cost_usd`; `bill_usd`: with spares."""

    cells_usd = _amount(_WITHOUT, allow_null=True)
    spares_usd = _amount("US dollars of machines in no cell; null where a filter leaves them out.", allow_null=True)
    spares_energy_j = _amount("Joules of the same.", allow_null=True)
    bill_usd = _amount("US dollars of all machines; null where a filter leaves some out.", allow_null=True)
    open_machine_hours = serializers.FloatField(help_text="Of hours that are not split yet; in no sum.")
    refused_readings = serializers.IntegerField(
        allow_null=True, help_text="Of meters, that could not be so; that time is estimated."
    )
    measured_percent = serializers.FloatField(
        allow_null=True, help_text="How much of the cells' energy meters counted; null: none is known."
    )


class TokenWeightSerializer(serializers.Serializer[Any]):
    """What tokens of a version weigh on an instance type when an hour is split; a computed prompt token weighs 1."""

    version = serializers.CharField()
    type = serializers.CharField()
    cached = serializers.FloatField(help_text="A prompt token out of the engine's cache.")
    completion = serializers.FloatField()
    known = serializers.ChoiceField(
        choices=SOURCES, help_text="`measured` by engines' steps, `rated` by prices of tokens, `estimated` by lists."
    )
    samples = serializers.IntegerField(allow_null=True, help_text="Looks of 15 s that were fitted; null: not measured.")
    nodes = serializers.IntegerField(allow_null=True)
    error_percent = serializers.FloatField(allow_null=True, help_text="Of busy time, which the model leaves over.")
    weight_error_percent = serializers.FloatField(allow_null=True, help_text="The standard error of `completion`.")
    bounded = serializers.BooleanField(help_text="Held within 30 times what prices say.")
    fitted_at = serializers.DateTimeField(allow_null=True)

    class Meta:
        examples = {"version": "sim-70b@1"}


class BatchPriceSerializer(serializers.Serializer[Any]):
    """What batches cost: their share of what ran, and what a million tokens more would cost, by comparing hours."""

    tokens = serializers.IntegerField()
    cost_usd = _amount("US dollars: their share.")
    usd_per_mtoken = _figure("US dollars, by their share")
    marginal_usd_per_mtoken = serializers.FloatField(allow_null=True, help_text="Null: hours do not tell.")
    marginal_usd_error = serializers.FloatField(allow_null=True, help_text="Its standard error.")
    marginal_joules_per_mtoken = serializers.FloatField(allow_null=True)
    hours = serializers.IntegerField(allow_null=True, help_text="That were compared.")


@extend_schema_serializer(many=False)
class CostSerializer(serializers.Serializer[Any]):
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    by = serializers.ChoiceField(choices=[(by.value, by.value) for by in By])
    group = serializers.ListField(child=serializers.CharField())
    rows = CostGroupSerializer(many=True)
    totals = CostTotalsSerializer()
    truncated = serializers.BooleanField(help_text="There are more groups than `limit`.")
    batches = BatchPriceSerializer(allow_null=True, help_text="Null: none in these hours, or a filter of accounts.")
    weights = TokenWeightSerializer(many=True)

    class Meta:
        examples = {"group": ["version", "type"]}


class CostViewSet(TablesViewSet):
    """What machines cost, took and emitted, by hours that are over: those of accounts for 90 days by the hour, then for
    400 by the day."""

    @extend_schema(
        operation_id="costs_list",
        parameters=table_parameters(DIMENSIONS, DEFAULT_GROUP),
        responses={
            ("200", "application/json"): CostSerializer,
            ("200", "text/csv"): str,
            ("200", PARQUET_TYPE): bytes,
        },
        filters=False,
    )
    def list(self, request: Request) -> HttpResponseBase:
        """Costs by groups, latest first, with totals: tenants + idle = cells, and with spares the bill."""
        given = given_once(request, (*DIMENSIONS, "from", "to", "by", "group", "limit", "as"))
        form, limit = form_of(given.pop("as", "json")), limit_of(given.pop("limit", str(DEFAULT_ROWS)))
        query = parsed_query(given, clock.now(), DIMENSIONS, DEFAULT_GROUP)
        if form == "csv":
            pieces = csv_pieces(cost_rows(query), COLUMNS)
            return download("costs", pieces, "text/csv; charset=utf-8", query, form)
        if form == "parquet":
            return download("costs", iter([_parquet(cost_rows(query))]), PARQUET_TYPE, query, form)
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
                "rows": [_shown(row) for row in answer.rows],
                "totals": {
                    **_figures(totals),
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
                "batches": _batches(query),
                "weights": [_weight(each) for each in token_weights(clock.now())],
            }
        )


def _parquet(rows: Any) -> bytes:
    try:
        return cost_parquet(rows)
    except TooManyRows as error:
        raise ValidationError({"from": [ErrorDetail(str(error), "range")]}) from error


def _batches(query: UsageQuery) -> dict[str, Any] | None:
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


def _weight(weight: TokenWeight) -> dict[str, Any]:
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


def _shown(row: CostRow) -> dict[str, Any]:
    return {"start": row.start, **{name: row.group.get(name) for name in DIMENSIONS}, **_figures(row)}


def _figures(row: CostRow) -> dict[str, Any]:
    figures = {name: None if value is None else round(float(value), 6) for name, value in row.all_figures().items()}
    tokens = {name: getattr(row.sums, name) for name in TOKEN_COLUMNS}
    return {**tokens, **row.amounts(), **figures, **row.sources()}
