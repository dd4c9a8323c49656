"""What machines cost, took and emitted, and what that is for a million tokens, added up as somebody requests it: out of
hours that are over, from the shares of accounts and from the machines themselves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

from django.db.models import Max, Min, QuerySet, Sum

from fleet.planning.rate import Source
from traffic.models import CellHour, CostShare
from traffic.planning.cost_figures import OF_ACCOUNTS, CostRow, CostSums
from traffic.planning.machine_cost import HOUR_MS
from traffic.planning.usage_query import By, UsageQuery
from traffic.selectors.usage import TRUNCATE

COLUMN = {
    "deployment": "deployment", "version": "version", "type": "instance_type", "region": "region", "tenant": "tenant",
    "class": "serving_class", "adapter": "adapter",
}  # fmt: skip
"""Dimension -> its column."""
_OF_SHARES = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "energy_uj", "carbon_ug")
_SOURCES = ("cost_source", "energy_source", "carbon_source")
_OF_MACHINES = {
    "machine_ms": "machine_ms", "idle_cost": "idle", "idle_uj": "idle_uj", "idle_carbon_ug": "idle_carbon_ug",
    "cells_cost": "cost", "cells_uj": "energy_uj", "measured_uj": "measured_uj", "refused": "refused",
}  # fmt: skip
"""Sum -> its column."""


@dataclass(frozen=True, slots=True)
class CostAnswer:
    """Groups, latest first and then by name, and the sums of all that the filters take. `spares`: of machines in no
    cell, None where a filter leaves them out; `open_ms`: machine time of hours that are not split yet."""

    rows: list[CostRow]
    totals: CostRow
    spares: CostSums | None
    open_ms: int
    truncated: bool = False


def cost_answer(query: UsageQuery, *, most: int) -> CostAnswer:
    """Costs by group, in seven queries."""
    rows = cost_rows(query)
    totals = cost_rows(replace(query, by=By.TOTAL, group=()))
    named = {name for name, _ in query.where}
    return CostAnswer(
        rows=rows[:most],
        totals=totals[0] if totals else CostRow(None, {}, CostSums(), has_idle=not named & OF_ACCOUNTS),
        spares=None if named - {"type", "region"} else spare_sums(query),
        open_ms=_machines(query).filter(settled=False).aggregate(ms=Sum("machine_ms"))["ms"] or 0,
        truncated=len(rows) > most,
    )


def cost_rows(query: UsageQuery) -> list[CostRow]:
    """All groups, latest first and then by name. Tokens of an hour that is not split yet are in none: nobody knows yet
    what they cost."""
    has_idle = not OF_ACCOUNTS & {*query.group, *(name for name, _ in query.where)}
    first_open = CellHour.objects.filter(settled=False).aggregate(at=Min("hour"))["at"]
    end = min(query.end, first_open) if first_open is not None else query.end
    groups: dict[tuple[Any, ...], CostSums] = {}
    parts = [*_sums_of_shares(replace(query, end=end))]
    if has_idle:
        parts += _sums_of_machines(query)
    for place, sums in parts:
        groups[place] = groups.get(place, CostSums()) + sums
    ordered = sorted(groups, key=lambda place: (-(place[0].timestamp() if place[0] else 0.0), *place[1:]))
    return [
        CostRow(place[0], dict(zip(query.group, place[1:], strict=True)), groups[place], has_idle) for place in ordered
    ]


def spare_sums(query: UsageQuery) -> CostSums:
    """Of machines that were in no cell: all of it is idle."""
    spares = _filtered(CellHour.objects.filter(deployment="", settled=True), query)
    return next((sums for _, sums in _grouped_machines(spares, replace(query, by=By.TOTAL, group=()))), CostSums())


def month_costs(month: date, end: datetime) -> dict[str, Decimal]:
    """Deployment -> US dollars that its machines cost since the beginning of a month (UTC), the hour that runs
    included; of no deployment: all machines together, spares included."""
    hours = CellHour.objects.filter(hour__gte=datetime.combine(month, time.min, UTC), hour__lt=end).order_by()
    spent = {
        row["deployment"]: Decimal(row["total"]) / HOUR_MS / 1_000_000
        for row in hours.values("deployment").annotate(total=Sum("spent"))
    }
    return {**spent, "": sum(spent.values(), Decimal(0))}


def _filtered(rows: "QuerySet[Any]", query: UsageQuery) -> "QuerySet[Any]":
    where = {COLUMN[name]: value for name, value in query.where}
    return rows.filter(hour__gte=query.start, hour__lt=query.end, **where).order_by()


def _machines(query: UsageQuery) -> "QuerySet[CellHour]":
    kept = tuple((name, value) for name, value in query.where if name not in OF_ACCOUNTS)
    return _filtered(CellHour.objects.exclude(deployment=""), replace(query, where=kept))


def _sums_of_shares(query: UsageQuery) -> Iterator[tuple[tuple[Any, ...], CostSums]]:
    sums = {name: Sum(name) for name in _OF_SHARES} | {f"worst_{name}": Max(name) for name in _SOURCES}
    for place, row in _grouped(_filtered(CostShare.objects.all(), query), query, sums):
        yield place, CostSums(**{name: row[name] for name in _OF_SHARES}, **_worst(row))


def _sums_of_machines(query: UsageQuery) -> Iterator[tuple[tuple[Any, ...], CostSums]]:
    return _grouped_machines(_machines(query).filter(settled=True), query)


def _grouped_machines(rows: "QuerySet[CellHour]", query: UsageQuery) -> Iterator[tuple[tuple[Any, ...], CostSums]]:
    sums: dict[str, Any] = {f"sum_{name}": Sum(column) for name, column in _OF_MACHINES.items()}
    sums |= {f"worst_{name}": Max(name) for name in _SOURCES}
    for place, row in _grouped(rows, query, sums):
        yield place, CostSums(**{name: row[f"sum_{name}"] for name in _OF_MACHINES}, **_worst(row))


def _worst(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: Source(row[f"worst_{name}"]) for name in _SOURCES}


def _grouped(
    rows: "QuerySet[Any]", query: UsageQuery, sums: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Beginning of the time and group -> sums."""
    names = [COLUMN[name] for name in query.group]
    if query.by is not By.TOTAL:
        rows = rows.annotate(start=TRUNCATE[query.by]("hour", tzinfo=UTC))
        for row in rows.values("start", *names).annotate(**sums).iterator(chunk_size=2000):
            yield (row["start"], *(row[name] for name in names)), row
    elif names:
        for row in rows.values(*names).annotate(**sums).iterator(chunk_size=2000):
            yield (None, *(row[name] for name in names)), row
    else:
        whole = rows.aggregate(**sums)
        if any(value is not None for value in whole.values()):
            yield (None,), whole
