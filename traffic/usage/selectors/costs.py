"""Reads costs of machines and accounts, summed by query parameters, and prices of batches. Whole days come from their
sums if these are current, other times from hours. It never writes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import F, Min, Q, QuerySet, Sum

from engine_agent.protocol.states import ServingClass
from fleet.capacity.planning.rates import Source
from traffic.usage.models import CellHour, CostShare
from traffic.usage.planning.figures import (
    OF_ACCOUNTS,
    BatchHour,
    By,
    CostRow,
    CostSums,
    MarginalPrice,
    SummedDays,
    TimeParts,
    UsageQuery,
    marginal_price,
    split_time,
)
from traffic.usage.selectors.sums import SummedTables, read_sums, summed_days

COST_COLUMN = {
    "deployment": "deployment", "version": "version", "type": "instance_type", "region": "region", "tenant": "tenant",
    "class": "serving_class", "adapter": "adapter",
}  # fmt: skip
"""Column of each dimension."""
_OF_SHARES = {
    name: name for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "energy_uj", "carbon_ug")
}
_SOURCES = ("cost_source", "energy_source", "carbon_source")
_OF_MACHINES = {
    "machine_ms": "machine_ms", "idle_cost": "idle", "idle_uj": "idle_uj", "idle_carbon_ug": "idle_carbon_ug",
    "cells_cost": "cost", "cells_uj": "energy_uj", "measured_uj": "measured_uj", "refused": "refused",
}  # fmt: skip
"""Column of each sum."""
_MONEY = frozenset({"cost", "idle_cost", "cells_cost"})
_SHARES = SummedTables("traffic_costshare", "traffic_costshareday", tuple(_OF_SHARES.values()), _SOURCES)
_CELLS = SummedTables(
    "traffic_cellhour", "traffic_cellday", tuple(_OF_MACHINES.values()), _SOURCES, "deployment <> ''", "settled"
)
_SPARES = replace(_CELLS, where="deployment = ''")
"""Machines in no cell, which are all idle."""
Place = tuple[Any, ...]
"""Start of the time, and the value of each dimension that is grouped by."""


@dataclass(frozen=True, slots=True)
class CostAnswer:
    """Groups, latest first and then by name, and totals. `spares` are machines in no cell, None if a filter excludes
    them; `open_ms` is machine time of unsettled hours."""

    rows: list[CostRow]
    totals: CostRow
    spares: CostSums | None
    open_ms: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class CostTime:
    """What is known of the time of a query. Tokens from `open_from` on are excluded, because their cost is unknown."""

    open_from: datetime | None
    summed: SummedDays

    def settled(self, query: UsageQuery) -> UsageQuery:
        return replace(query, end=min(query.end, self.open_from)) if self.open_from is not None else query


def cost_time(query: UsageQuery) -> CostTime:
    """Two queries."""
    return CostTime(CellHour.objects.filter(settled=False).aggregate(at=Min("hour"))["at"], summed_days(query))


def cost_answer(query: UsageQuery, *, most: int, time: CostTime | None = None) -> CostAnswer:
    """Returns costs by group, in at most seven queries."""
    time = time or cost_time(query)
    rows = cost_rows(query, time=time)
    named = {name for name, _ in query.where}
    has_idle = not named & OF_ACCOUNTS
    whole = replace(query, by=By.TOTAL, group=(), only=None)
    total = sum((row.sums for row in rows), CostSums())
    if has_idle and OF_ACCOUNTS & {*query.group}:
        total = sum((row.sums for row in machine_rows(whole, time=time)), total)
    unsettled = _cells(query).filter(hour__gte=query.start, hour__lt=query.end, settled=False)
    spares = None
    if not named - {"type", "region"}:
        spares = sum((sums for _, sums in _sums_of_machines(whole, time, _SPARES)), CostSums())
    return CostAnswer(
        rows=rows[:most],
        totals=CostRow(None, {}, total, has_idle),
        spares=spares,
        open_ms=unsettled.aggregate(ms=Sum("machine_ms", default=0))["ms"] if time.open_from else 0,
        truncated=len(rows) > most,
    )


def cost_rows(query: UsageQuery, *, time: CostTime | None = None) -> list[CostRow]:
    """Returns all groups, latest first and then by name. Tokens of unsettled hours are excluded, because their cost is
    unknown."""
    time = time or cost_time(query)
    has_idle = not OF_ACCOUNTS & {*query.group, *(name for name, _ in query.where)}
    shares = _sums_of_shares(time.settled(query), time)
    machines = _sums_of_machines(query, time) if has_idle else ()
    return _added_up(itertools.chain(shares, machines), query, has_idle=has_idle)


def machine_rows(query: UsageQuery, *, time: CostTime) -> list[CostRow]:
    """Returns the sums of machines in cells, without those of accounts."""
    return _added_up(_sums_of_machines(query, time), query, has_idle=True)


def _added_up(parts: Iterable[tuple[Place, CostSums]], query: UsageQuery, *, has_idle: bool) -> list[CostRow]:
    groups: dict[Place, CostSums] = {}
    for place, sums in parts:
        before = groups.get(place)
        groups[place] = sums if before is None else before + sums
    ordered = sorted(groups, key=lambda place: (-(place[0].timestamp() if place[0] else 0.0), *place[1:]))
    return [
        CostRow(place[0], dict(zip(query.group, place[1:], strict=True)), groups[place], has_idle) for place in ordered
    ]


def _sums_of_shares(query: UsageQuery, time: CostTime) -> Iterator[tuple[Place, CostSums]]:
    known = time.summed
    parts = split_time(query.start, query.end, () if query.by is By.HOUR else known.of_accounts, known.expired)
    return _cost_sums(_SHARES, query, parts, _OF_SHARES)


def _sums_of_machines(
    query: UsageQuery, time: CostTime, tables: SummedTables = _CELLS
) -> Iterator[tuple[Place, CostSums]]:
    """Ignores filters by account, which machines do not have."""
    where = tuple((name, value) for name, value in query.where if name not in OF_ACCOUNTS)
    parts = split_time(query.start, query.end, () if query.by is By.HOUR else time.summed.current)
    return _cost_sums(tables, replace(query, where=where), parts, _OF_MACHINES)


def _cost_sums(
    tables: SummedTables, query: UsageQuery, parts: TimeParts, names: Mapping[str, str]
) -> Iterator[tuple[Place, CostSums]]:
    places, sums = len(query.group) + 1, len(query.group) + 1 + len(names)
    for row in read_sums(tables, query, parts, COST_COLUMN):
        amounts = zip(names, row[places:sums], strict=True)
        found: dict[str, Any] = {name: amount if name in _MONEY else int(amount) for name, amount in amounts}
        found |= {name: Source(worst) for name, worst in zip(_SOURCES, row[sums:], strict=True)}
        yield row[:places], CostSums(**found)


def _cells(query: UsageQuery) -> "QuerySet[CellHour]":
    where = {COST_COLUMN[name]: value for name, value in query.where if name not in OF_ACCOUNTS}
    return CellHour.objects.exclude(deployment="").filter(**where)


BATCH = ServingClass.BATCH.value


@dataclass(frozen=True, slots=True)
class BatchPrice:
    """`sums` of batches; `average` US dollars per million of their tokens by their share, None if unknown; `usd` and
    `joules` of a million additional tokens, None if hours do not determine them."""

    sums: CostSums
    average: Decimal | None
    usd: MarginalPrice | None
    joules: MarginalPrice | None


def batch_price(query: UsageQuery, *, time: CostTime | None = None) -> BatchPrice | None:
    """Computes batch prices from the hours of a query without account filters; None with such filters or without
    batches. Days whose hours are no longer kept count in `sums` only."""
    if OF_ACCOUNTS & {name for name, _ in query.where}:
        return None
    time = time or cost_time(query)
    whole = replace(query, by=By.TOTAL, group=(), where=(*query.where, ("class", BATCH)), only=None)
    sums = next((row.sums for row in cost_rows(whole, time=time)), CostSums())
    if not sums.tokens:
        return None
    settled = time.settled(query)
    spans = split_time(settled.start, settled.end, (), time.summed.expired).hours
    kept = reduce(or_, (Q(hour__gte=start, hour__lt=end) for start, end in spans), Q(pk__in=()))
    each = F("prompt_tokens") + F("completion_tokens")
    where = {COST_COLUMN[name]: value for name, value in query.where}
    shares = CostShare.objects.filter(kept, **where).order_by().values_list("hour")
    of_classes = shares.annotate(every=Sum(each), own=Sum(each, filter=Q(serving_class=BATCH), default=0))
    tokens = {hour: (every, own) for hour, every, own in of_classes}
    cells = _cells(query).filter(kept, settled=True).order_by().values_list("hour")
    usd, joules = [], []
    for hour, dollars, microjoules in cells.annotate(dollars=Sum("cost"), drawn=Sum("energy_uj")).order_by("hour"):
        every, own = tokens.get(hour, (0, 0))
        usd.append(BatchHour(float(dollars), every - own, own))
        joules.append(BatchHour(microjoules / 1e6, every - own, own))
    return BatchPrice(
        sums, sums.figures(with_idle=False)["usd_per_mtoken"], marginal_price(usd), marginal_price(joules)
    )
