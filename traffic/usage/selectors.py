"""Reads usage, prices, token weights, costs, batch prices and budgets with their use, summed by query parameters from
hours and, where those are no longer kept, days. It never writes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any

from django.db.models import F, Max, Min, Q, QuerySet, Sum
from django.db.models.functions import TruncDay, TruncHour, TruncMonth

from engine_agent.protocol.states import ServingClass
from fleet.capacity.planning.rates import OF_TOKENS, Rates, Source
from fleet.cells.models import CellMember
from fleet.faults.planning.report import TenantImpact
from fleet.regions.models import Rate
from traffic.keys.models import ApplicationKey
from traffic.usage.models import AMOUNTS, COUNTS, Budget, CellHour, CostShare, TokenFit, UsageDay, UsageHour, UsageMonth
from traffic.usage.planning.counting import BudgetUnit, describe_use, month_of, used_percent
from traffic.usage.planning.figures import (
    OF_ACCOUNTS,
    BatchHour,
    By,
    CostRow,
    CostSums,
    MarginalPrice,
    UsageQuery,
    marginal_price,
)
from traffic.usage.planning.prices import FIT_KEPT, HOUR_MS, TokenPrice, TokenWeights, token_price, weights_of

COLUMN = {"tenant": "tenant", "key": "key", "deployment": "deployment", "class": "serving_class", "adapter": "adapter"}
"""Column of each dimension."""
SUMMED = (*COUNTS, *AMOUNTS)
TRUNCATE = {By.HOUR: TruncHour, By.DAY: TruncDay, By.MONTH: TruncMonth}
NOTHING = dict.fromkeys(COUNTS, 0) | dict.fromkeys(AMOUNTS, Decimal(0))
TICK = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group: start of its time (None for the whole query), dimensions by name, and sums by column."""

    start: datetime | None
    group: dict[str, str]
    sums: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    """Groups, latest first and then by name, and totals. `truncated`: there are more groups."""

    rows: list[UsageRow]
    totals: dict[str, Any]
    truncated: bool = False


def usage_answer(query: UsageQuery, *, most: int) -> UsageAnswer:
    """Returns usage by group, in four queries."""
    rows = list(itertools.islice(usage_stream(query), most + 1))
    whole = replace(query, by=By.TOTAL, group=())
    totals = _merged_rows(usage_parts(whole), whole)
    return UsageAnswer(rows[:most], totals[0].sums if totals else dict(NOTHING), len(rows) > most)


def usage_stream(query: UsageQuery) -> Iterator[UsageRow]:
    """Yields groups, latest first and then by name, in constant memory. A month or the whole time may be partly in
    hours and partly in days; those are read first."""
    if query.by in (By.HOUR, By.DAY):
        yield from (_usage_row(found, query) for found in usage_parts(query))
    else:
        yield from _merged_rows(usage_parts(query), query)


def usage_parts(query: UsageQuery) -> Iterator[dict[str, Any]]:
    """Yields sums of hours, then of days without hours. A group of a day or hour is in one of them only."""
    hours = UsageHour.objects.filter(hour__gte=query.start, hour__lt=query.end)
    yield from _summed_rows(hours, query, "hour")
    if query.by is not By.HOUR:
        days = UsageDay.objects.filter(day__gte=query.start.date(), day__lte=(query.end - TICK).date())
        yield from _summed_rows(days, query, "day")


def _merged_rows(parts: Iterable[dict[str, Any]], query: UsageQuery) -> list[UsageRow]:
    groups: dict[tuple[Any, ...], UsageRow] = {}
    for part in parts:
        row = _usage_row(part, query)
        place = (row.start, *row.group.values())
        if place in groups:
            sums = groups[place].sums
            sums.update({name: sums[name] + row.sums[name] for name in SUMMED})
        else:
            groups[place] = row
    return sorted(groups.values(), key=lambda row: (-_start_seconds(row.start), *row.group.values()))


def _usage_row(found: dict[str, Any], query: UsageQuery) -> UsageRow:
    start = found["start"]
    if start is not None and not isinstance(start, datetime):
        start = datetime(start.year, start.month, start.day, tzinfo=UTC)
    group = {name: found[COLUMN[name]] for name in query.group}
    return UsageRow(start, group, {name: found[name] for name in SUMMED})


def _start_seconds(start: datetime | None) -> float:
    return start.timestamp() if start else 0.0


def _summed_rows(rows: "QuerySet[Any]", query: UsageQuery, time: str) -> Iterator[dict[str, Any]]:
    rows = rows.filter(**{COLUMN[name]: value for name, value in query.where})
    return _grouped_sums(
        rows, query.by, time, [COLUMN[name] for name in query.group], {name: Sum(name) for name in SUMMED}
    )


def _grouped_sums(
    rows: "QuerySet[Any]", by: By, time: str, columns: list[str], sums: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the sums of each group and its `start`, latest first; nothing if there are no rows."""
    if by is not By.TOTAL:
        groups = rows.annotate(start=TRUNCATE[by](time)).values("start", *columns).annotate(**sums)
        yield from groups.order_by("-start", *columns).iterator(chunk_size=2000)
    elif columns:
        for row in rows.order_by().values(*columns).annotate(**sums).iterator(chunk_size=2000):
            yield {"start": None, **row}
    else:
        whole = rows.aggregate(**sums)
        if any(value is not None for value in whole.values()):
            yield {"start": None, **whole}


def token_prices(now: datetime) -> dict[str, TokenPrice]:
    """Returns prices in force by deployment, in one query."""
    begun = Rate.objects.filter(kind__in=OF_TOKENS, valid_from__lte=now).order_by("kind", "subject", "-valid_from")
    in_force = [row.rate() for row in begun.distinct("kind", "subject")]
    rates = Rates(in_force, now)
    found = {name: token_price(rates, name) for name in sorted({rate.subject for rate in in_force})}
    return {name: price for name, price in found.items() if price is not None}


Fits = Mapping[tuple[str, str], TokenWeights]
"""Weights by (version, instance type)."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """`source`: `measured` from steps of engines, `rated` from token prices in force, `estimated` from price lists."""

    weights: TokenWeights
    source: Source


def fits_at(now: datetime) -> Fits:
    """Returns recent fits, in one query."""
    rows = TokenFit.objects.filter(fitted_at__gte=now - timedelta(days=FIT_KEPT))
    return {(row.version, row.instance_type): row.weights() for row in rows}


def weighing(fits: Fits, version: str, instance_type: str, price: TokenPrice | None) -> Weighing:
    """Returns the token weights of a version on an instance type. `price` is that of their deployment in force."""
    fitted = fits.get((version, instance_type))
    if fitted is not None:
        return Weighing(fitted, Source.MEASURED)
    is_stated = price is not None and bool(price.prompt or price.completion)
    return Weighing(weights_of(price), Source.RATED if is_stated else Source.ESTIMATED)


@dataclass(frozen=True, slots=True)
class TokenWeight:
    """Token weights of a version on an instance type, in computed prompt tokens. `fit` is the measurement."""

    version: str
    instance_type: str
    cached: float
    completion: float
    source: Source
    fit: TokenFit | None


def token_weights(now: datetime) -> list[TokenWeight]:
    """Returns the weights of all versions in cells or with a recent measurement, by version and type, in three
    queries."""
    fits = {
        (row.version, row.instance_type): row
        for row in TokenFit.objects.filter(fitted_at__gte=now - timedelta(days=FIT_KEPT))
    }
    prices = token_prices(now)
    served = CellMember.objects.filter(rank=0).order_by("cell__deployment_id")
    columns = (
        "cell__deployment_id",
        "cell__model_version__model_id",
        "cell__model_version__version",
        "node__instance_type_id",
    )
    places: dict[tuple[str, str], TokenPrice | None] = dict.fromkeys(fits)
    for deployment, model, version, instance_type in served.values_list(*columns).distinct():
        places[f"{model}@{version}", instance_type] = prices.get(deployment)
    by_fit = {place: row.weights() for place, row in fits.items()}
    found = []
    for version, instance_type in sorted(places):
        weighed = weighing(by_fit, version, instance_type, places[version, instance_type])
        prompt = max(1, weighed.weights.prompt)
        found.append(
            TokenWeight(
                version, instance_type, weighed.weights.cached / prompt, weighed.weights.completion / prompt,
                weighed.source, fits.get((version, instance_type)),
            )
        )  # fmt: skip
    return found


COST_COLUMN = {
    "deployment": "deployment", "version": "version", "type": "instance_type", "region": "region", "tenant": "tenant",
    "class": "serving_class", "adapter": "adapter",
}  # fmt: skip
"""Column of each dimension."""
_OF_SHARES = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "energy_uj", "carbon_ug")
_SOURCES = ("cost_source", "energy_source", "carbon_source")
_OF_MACHINES = {
    "machine_ms": "machine_ms", "idle_cost": "idle", "idle_uj": "idle_uj", "idle_carbon_ug": "idle_carbon_ug",
    "cells_cost": "cost", "cells_uj": "energy_uj", "measured_uj": "measured_uj", "refused": "refused",
}  # fmt: skip
"""Column of each sum."""


@dataclass(frozen=True, slots=True)
class CostAnswer:
    """Groups, latest first and then by name, and totals. `spares` are machines in no cell, None if a filter excludes
    them; `open_ms` is machine time of unsettled hours."""

    rows: list[CostRow]
    totals: CostRow
    spares: CostSums | None
    open_ms: int
    truncated: bool = False


def cost_answer(query: UsageQuery, *, most: int) -> CostAnswer:
    """Returns costs by group, in seven queries."""
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
    """Returns all groups, latest first and then by name. Tokens of unsettled hours are excluded, because their cost is
    unknown."""
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
    """Returns sums of machines in no cell, which are all idle."""
    spares = _filtered_rows(CellHour.objects.filter(deployment="", settled=True), query)
    return next(
        (sums for _, sums in _cost_sums(spares, replace(query, by=By.TOTAL, group=()), _OF_MACHINES)), CostSums()
    )


def month_costs(month: date, end: datetime) -> dict[str, Decimal]:
    """Returns the machine cost of each deployment in US dollars since the start of a month (UTC), including the current
    hour; the empty deployment is all machines, including spares."""
    hours = CellHour.objects.filter(hour__gte=datetime.combine(month, time.min, UTC), hour__lt=end).order_by()
    spent = {
        row["deployment"]: Decimal(row["total"]) / HOUR_MS / 1_000_000
        for row in hours.values("deployment").annotate(total=Sum("spent"))
    }
    return {**spent, "": sum(spent.values(), Decimal(0))}


def _filtered_rows(rows: "QuerySet[Any]", query: UsageQuery) -> "QuerySet[Any]":
    where = {COST_COLUMN[name]: value for name, value in query.where}
    return rows.filter(hour__gte=query.start, hour__lt=query.end, **where)


def _machines(query: UsageQuery) -> "QuerySet[CellHour]":
    kept = tuple((name, value) for name, value in query.where if name not in OF_ACCOUNTS)
    return _filtered_rows(CellHour.objects.exclude(deployment=""), replace(query, where=kept))


def _sums_of_shares(query: UsageQuery) -> Iterator[tuple[tuple[Any, ...], CostSums]]:
    rows = _filtered_rows(CostShare.objects.all(), query)
    return _cost_sums(rows, query, dict(zip(_OF_SHARES, _OF_SHARES, strict=True)))


def _sums_of_machines(query: UsageQuery) -> Iterator[tuple[tuple[Any, ...], CostSums]]:
    return _cost_sums(_machines(query).filter(settled=True), query, _OF_MACHINES)


def _cost_sums(
    rows: "QuerySet[Any]", query: UsageQuery, column_of: Mapping[str, str]
) -> Iterator[tuple[tuple[Any, ...], CostSums]]:
    columns = [COST_COLUMN[name] for name in query.group]
    sums = {f"sum_{name}": Sum(column) for name, column in column_of.items()}
    worst = {f"worst_{name}": Max(name) for name in _SOURCES}
    for row in _grouped_sums(rows, query.by, "hour", columns, {**sums, **worst}):
        found: dict[str, Any] = {name: row[f"sum_{name}"] for name in column_of}
        found |= {name: Source(row[f"worst_{name}"]) for name in _SOURCES}
        yield (row["start"], *(row[column] for column in columns)), CostSums(**found)


BATCH = ServingClass.BATCH.value


@dataclass(frozen=True, slots=True)
class BatchPrice:
    """`sums` of batches; `average` US dollars per million of their tokens by their share, None if unknown; `usd` and
    `joules` of a million additional tokens, None if hours do not determine them."""

    sums: CostSums
    average: Decimal | None
    usd: MarginalPrice | None
    joules: MarginalPrice | None


def batch_price(query: UsageQuery) -> BatchPrice | None:
    """Computes batch prices from the hours of a query without account filters; None with such filters or without
    batches."""
    if OF_ACCOUNTS & {name for name, _ in query.where}:
        return None
    by_class = cost_rows(replace(query, by=By.HOUR, group=("class",)))
    batches = [row for row in by_class if row.group["class"] == BATCH]
    if not any(row.sums.tokens for row in batches):
        return None
    sums = sum((row.sums for row in batches), CostSums())
    cells = {row.start: row.sums for row in cost_rows(replace(query, by=By.HOUR, group=()))}
    own = _account_tokens(batches)
    others = _account_tokens([row for row in by_class if row.group["class"] != BATCH])
    usd = [BatchHour(float(hour.cells_cost), others.get(at, 0), own.get(at, 0)) for at, hour in cells.items()]
    joules = [BatchHour(hour.cells_uj / 1e6, others.get(at, 0), own.get(at, 0)) for at, hour in cells.items()]
    return BatchPrice(
        sums, sums.figures(with_idle=False)["usd_per_mtoken"], marginal_price(usd), marginal_price(joules)
    )


def _account_tokens(rows: list[CostRow]) -> dict[datetime | None, int]:
    found: dict[datetime | None, int] = {}
    for row in rows:
        found[row.start] = found.get(row.start, 0) + row.sums.tokens
    return found


class MonthUse:
    """Usage in the month of `now`. Each table is read once, when a budget needs it."""

    def __init__(self, now: datetime) -> None:
        self.month = month_of(now)
        self._now = now

    def of(self, budget: Budget) -> Decimal:
        if budget.is_of_machines:
            return self._machines.get(budget.deployment, Decimal(0))
        used = self._keys.get(budget.key) if budget.key else self._tenants.get(budget.tenant)
        tokens, charged = used or (Decimal(0), Decimal(0))
        return tokens if budget.unit == BudgetUnit.TOKENS else charged

    @cached_property
    def _machines(self) -> dict[str, Decimal]:
        return month_costs(self.month, self._now)

    @cached_property
    def _tenants(self) -> dict[str, tuple[Decimal, Decimal]]:
        tenants = Budget.objects.exclude(tenant="").values("tenant")
        months = UsageMonth.objects.filter(month=self.month, tenant__in=tenants)
        return {row.tenant: (Decimal(row.tokens), row.charged) for row in months}

    @cached_property
    def _keys(self) -> dict[str, tuple[Decimal, Decimal]]:
        """Of keys with a budget, by the first key of their rotations. Hours are kept for longer than a month."""
        began = datetime(self.month.year, self.month.month, 1, tzinfo=UTC)
        limited = Budget.objects.exclude(key="").values("key")
        replaced = ApplicationKey.objects.filter(first_prefix__in=limited)
        first = dict(replaced.values_list("prefix", "first_prefix"))
        hours = UsageHour.objects.filter(Q(key__in=limited) | Q(key__in=list(first)), hour__gte=began)
        tokens = Sum(F("prompt_tokens") + F("completion_tokens"))
        used: dict[str, tuple[Decimal, Decimal]] = {}
        for key, more, charged in hours.order_by().values_list("key").annotate(tokens=tokens, charged=Sum("charged")):
            before = used.get(first.get(key, key), (Decimal(0), Decimal(0)))
            used[first.get(key, key)] = (before[0] + more, before[1] + charged)
        return used


BUDGET_STATES = ("within", "alerted", "over", "keys refused")


@dataclass(frozen=True, slots=True)
class BudgetView:
    """A budget for pages; `used` is text."""

    budget: Budget
    used: str
    percent: Decimal

    @property
    def state(self) -> str:
        if self.budget.stopped:
            return "keys refused"
        return "over" if self.percent >= 100 else "alerted" if self.budget.level else "within"


def budget_views(now: datetime, whose: Q | None = None) -> list[BudgetView]:
    """All budgets, or those of `whose`, the most used first."""
    month = MonthUse(now)
    uses = [(row, month.of(row)) for row in Budget.objects.filter(whose or Q())]
    views = [BudgetView(row, describe_use(row.rules(), used), used_percent(row.rules(), used)) for row, used in uses]
    return sorted(views, key=lambda view: (-view.percent, view.budget.subject))


TENANTS_NAMED = 20


def tenants_hit(deployments: Iterable[str], start: datetime, end: datetime) -> tuple[TenantImpact, ...]:
    """Tenants with failed requests to these deployments in the hours from `start` to `end`, most failures first. One
    query."""
    first = start.replace(minute=0, second=0, microsecond=0)
    rows = UsageHour.objects.filter(hour__range=(first, end), deployment__in=list(deployments))
    failed, arrived = F("errors") + F("refused"), F("requests") + F("refused")
    sums = rows.order_by().values("tenant").annotate(hit=Sum(failed), seen=Sum(arrived)).filter(hit__gt=0)
    most = sums.order_by("-hit", "tenant").values_list("tenant", "hit", "seen")[:TENANTS_NAMED]
    return tuple(TenantImpact(*each) for each in most)
