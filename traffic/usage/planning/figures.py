"""Parses queries of usage and costs, renders tables as CSV, and computes cost, energy and emissions per million tokens,
including those of additional batch tokens. Pure. `parse_usage_query` reads external text; its errors name the
parameter. Each figure has its source; a figure without tokens or from unknown data is None."""

import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any, Protocol

from engine_agent.protocol.states import ServingClass
from fleet.capacity.planning.rates import Source
from traffic.usage.planning.prices import SHOWN, solve, weighed

DIMENSIONS = ("tenant", "key", "deployment", "class", "adapter")
"""Dimensions for grouping and filtering, in order."""
UNGROUPED = "none"
DEFAULT_SPAN = timedelta(days=7)
MOST_SPAN = timedelta(days=401)
"""Retention of days."""
HOURS_KEPT = timedelta(days=90)
"""Retention of hours; older usage is known by day."""
_AGO = re.compile(r"([0-9]{1,6})([hdw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
ONE_DAY = timedelta(days=1)
MOST_LETTERS = 160
"""Length of the longest column, version references."""


class By(StrEnum):
    """Time of one row; `total` is the whole range."""

    TOTAL = "total"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


class BadQuery(ValueError):
    """`field` is the invalid parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """From `start` (included) to `end` (excluded). `where` pairs dimensions with the value to select; `only` lists
    the groups to select, by their values."""

    start: datetime
    end: datetime
    by: By = By.TOTAL
    group: tuple[str, ...] = ("tenant",)
    where: tuple[tuple[str, str], ...] = ()
    only: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class SummedDays:
    """Days (UTC) that have sums. `current` ones equal the sums of their hours. The hours of accounts of `expired` ones
    are no longer kept; those of machines are."""

    current: frozenset[date] = frozenset()
    expired: frozenset[date] = frozenset()

    @property
    def of_accounts(self) -> frozenset[date]:
        return self.current | self.expired


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Disjoint parts of a time. `days` are first and last days, `hours` a start and an excluded end."""

    days: tuple[tuple[date, date], ...]
    hours: tuple[tuple[datetime, datetime], ...]


def split_time(
    start: datetime, end: datetime, summed: Collection[date], expired: Collection[date] = frozenset()
) -> TimeParts:
    """Reads as many days as possible from their sums, and all other times by hour. A day counts if all of it is in the
    time; an expired one also if a part is, because its hours are unknown."""
    days: list[tuple[date, date]] = []
    hours: list[tuple[datetime, datetime]] = []
    at = start
    for day in sorted({*summed, *expired}) if start < end else ():
        begin = datetime.combine(day, datetime.min.time(), UTC)
        over = begin + ONE_DAY
        if not (start <= begin and over <= end if day not in expired else start < over and begin < end):
            continue
        if at < begin:
            hours.append((at, begin))
        if days and days[-1][1] == day - ONE_DAY:
            days[-1] = (days[-1][0], day)
        else:
            days.append((day, day))
        at = over
    if at < end:
        hours.append((at, end))
    return TimeParts(tuple(days), tuple(hours))


def parse_usage_query(
    given: Mapping[str, str], now: datetime, dimensions: tuple[str, ...] = DIMENSIONS, group: str = "tenant"
) -> UsageQuery:
    """Parses dimensions, `from`, `to`, `by` and `group`; `group` is the default grouping. Raises BadQuery if a
    parameter is invalid."""
    end = parse_moment("to", given["to"], now) if "to" in given else now
    start = parse_moment("from", given["from"], now) if "from" in given else end - DEFAULT_SPAN
    if start >= end:
        raise BadQuery("from", f"`from` ({start:%Y-%m-%dT%H:%M:%SZ}) must be before `to` ({end:%Y-%m-%dT%H:%M:%SZ})")
    if end - start > MOST_SPAN:
        raise BadQuery("from", f"at most {MOST_SPAN.days} days can be requested together")
    where = tuple((name, _parsed_value(name, given[name])) for name in dimensions if name in given)
    groups = _parsed_group(given.get("group", group), dimensions)
    return UsageQuery(start, end, _parsed_by(given.get("by", By.TOTAL)), groups, where)


def parse_moment(field: str, text: str, now: datetime) -> datetime:
    """Parses `7d`, `12h` or `2w` (ago), a date (`2026-11-01`, its start in UTC) or an RFC 3339 time. Raises BadQuery if
    it is none of these."""
    if ago := _AGO.fullmatch(text):
        span = int(ago[1]) * _UNITS[ago[2]]
        if span <= timedelta(days=36_500):
            return now - span
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
            return datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        if moment.tzinfo is not None and 2000 <= moment.year <= 9000:
            return moment.astimezone(UTC)
    except ValueError:
        pass
    forms = "`7d`, `12h`, `2w` (ago), a date `2026-11-01`, or `2026-11-01T12:00:00Z`"
    raise BadQuery(field, f"`{field}` must be {forms}, not {text[:40]!r}")


def _parsed_by(text: str) -> By:
    try:
        return By(text)
    except ValueError:
        raise BadQuery("by", f"`by` must be one of {', '.join(By)}, not {text[:40]!r}") from None


def _parsed_group(text: str, dimensions: tuple[str, ...]) -> tuple[str, ...]:
    named = [] if text == UNGROUPED else [name.strip() for name in text.split(",")]
    if wrong := [name for name in named if name not in dimensions]:
        raise BadQuery("group", f"`group` may name {', '.join(dimensions)}, or be {UNGROUPED}, not {wrong[0][:40]!r}")
    return tuple(name for name in dimensions if name in named)


def _parsed_value(name: str, text: str) -> str:
    if not 0 < len(text) <= MOST_LETTERS or not text.isprintable():
        raise BadQuery(name, f"`{name}` must be 1 to {MOST_LETTERS} letters")
    if name == "class" and text not in set(ServingClass):
        raise BadQuery(name, f"`class` must be one of {', '.join(ServingClass)}, not {text[:40]!r}")
    return text.removeprefix("sw_") if name == "key" else text


COUNT_COLUMNS = (
    "arrived", "limited", "failed", "refused", "requests", "errors", "cancelled", "estimated", "prompt_tokens",
    "cached_tokens", "completion_tokens",
)  # fmt: skip
AMOUNT_COLUMNS = ("charged_usd", "machine_cost_usd")
COLUMNS = ("start", *DIMENSIONS, *COUNT_COLUMNS, *AMOUNT_COLUMNS)
FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Spreadsheets execute cells that start with these (OWASP, "CSV Injection")."""
CSV_PIECE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row. Dimensions that are not grouped by are empty."""

    start: datetime | None
    group: Mapping[str, str]
    counts: Mapping[str, int]
    charged: Decimal
    machine_cost: Decimal

    def cells(self) -> list[Any]:
        """Returns values in the order of `COLUMNS`."""
        return [
            time_text(self.start),
            *(self.group.get(name, "") for name in DIMENSIONS),
            *(self.counts[name] for name in COUNT_COLUMNS),
            money_text(self.charged),
            money_text(self.machine_cost),
        ]


def time_text(at: datetime | None) -> str:
    """Returns "2026-11-26T12:00:00Z", or empty for the whole range."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at else ""


def money_text(amount: Decimal) -> str:
    """Returns US dollars with six decimals: "12.340000"."""
    return f"{amount.quantize(SHOWN):f}"


def safe_text(text: str) -> str:
    """Returns text that spreadsheets do not execute."""
    return f"'{text}" if text.startswith(FORMULA_BEGINS) else text


class HasCells(Protocol):
    def cells(self) -> list[Any]: ...


def csv_pieces(rows: Iterable[HasCells], columns: tuple[str, ...] = COLUMNS) -> Iterator[bytes]:
    """Yields the table as CSV (RFC 4180) with header, in pieces of a few kilobytes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([safe_text(cell) if isinstance(cell, str) else cell for cell in row.cells()])
        if buffer.tell() >= CSV_PIECE_BYTES:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


COST_DIMENSIONS = ("deployment", "version", "type", "region", "tenant", "class", "adapter")
"""Dimensions for grouping and filtering, in order."""
OF_ACCOUNTS = frozenset({"tenant", "class", "adapter"})
"""Dimensions that idle time does not have."""
MILLION = Decimal(1_000_000)
FIGURES = ("usd_per_mtoken", "joules_per_mtoken", "gco2e_per_mtoken")
SOURCES = ("cost_source", "energy_source", "carbon_source")


@dataclass(frozen=True, slots=True)
class CostSums:
    """Sums of settled hours. `cost`, `energy_uj` and `carbon_ug` are of accounts, in US dollars, microjoules and
    micrograms of CO2 equivalent; `idle_*` are unattributed; `cells_*` are both, as counted of machines. `measured_uj`
    is the metered part of the energy, with `refused` readings. `machine_ms` is machine time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    machine_ms: int = 0
    cost: Decimal = Decimal(0)
    energy_uj: int = 0
    carbon_ug: int = 0
    idle_cost: Decimal = Decimal(0)
    idle_uj: int = 0
    idle_carbon_ug: int = 0
    cells_cost: Decimal = Decimal(0)
    cells_uj: int = 0
    measured_uj: int = 0
    refused: int = 0
    cost_source: Source = Source.MEASURED
    energy_source: Source = Source.MEASURED
    carbon_source: Source = Source.MEASURED

    def __add__(self, other: "CostSums") -> "CostSums":
        counts = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        return CostSums(**counts, **{name: max(getattr(self, name), getattr(other, name)) for name in SOURCES})

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def figures(self, *, with_idle: bool) -> dict[str, Decimal | None]:
        """Returns values by `FIGURES`, per million prompt and completion tokens: US dollars, joules, grams of CO2
        equivalent."""
        amounts = (
            self.cost + (self.idle_cost if with_idle else 0),
            Decimal(self.energy_uj + (self.idle_uj if with_idle else 0)) / MILLION,
            Decimal(self.carbon_ug + (self.idle_carbon_ug if with_idle else 0)) / MILLION,
        )
        sources = (self.cost_source, self.energy_source, self.carbon_source)
        return {
            name: amount * MILLION / self.tokens if self.tokens and source is not Source.UNKNOWN else None
            for name, amount, source in zip(FIGURES, amounts, sources, strict=True)
        }


COUNTS = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "machine_ms", "cost", "energy_uj", "carbon_ug", "idle_cost",
    "idle_uj", "idle_carbon_ug", "cells_cost", "cells_uj", "measured_uj", "refused",
)  # fmt: skip
COST_AMOUNT_COLUMNS = (
    "machine_hours", "cost_usd", "idle_cost_usd", "energy_j", "idle_energy_j", "carbon_g", "idle_carbon_g",
)  # fmt: skip
TOKEN_COLUMNS = ("prompt_tokens", "cached_tokens", "completion_tokens")
FIGURE_COLUMNS = (*FIGURES, *(f"{name}_with_idle" for name in FIGURES))
COST_COLUMNS = ("start", *COST_DIMENSIONS, *TOKEN_COLUMNS, *COST_AMOUNT_COLUMNS, *FIGURE_COLUMNS, *SOURCES)


@dataclass(frozen=True, slots=True)
class CostRow:
    """One group: start of its time (None for the whole range), dimensions by name, and sums. `has_idle` is False for
    groups of tenants and classes."""

    start: datetime | None
    group: Mapping[str, str]
    sums: CostSums
    has_idle: bool

    def amounts(self) -> dict[str, str | None]:
        """Returns exact values as text, by `AMOUNT_COLUMNS`."""
        sums, idle = self.sums, self.has_idle
        return {
            "machine_hours": money_text(Decimal(sums.machine_ms) / 3_600_000) if idle else None,
            "cost_usd": money_text(sums.cost),
            "idle_cost_usd": money_text(sums.idle_cost) if idle else None,
            "energy_j": micro_text(sums.energy_uj),
            "idle_energy_j": micro_text(sums.idle_uj) if idle else None,
            "carbon_g": micro_text(sums.carbon_ug),
            "idle_carbon_g": micro_text(sums.idle_carbon_ug) if idle else None,
        }

    def all_figures(self) -> dict[str, Decimal | None]:
        """Returns values by `FIGURE_COLUMNS`."""
        with_idle = self.sums.figures(with_idle=True) if self.has_idle else dict.fromkeys(FIGURES)
        return {**self.sums.figures(with_idle=False), **{f"{name}_with_idle": with_idle[name] for name in FIGURES}}

    def figure_texts(self) -> dict[str, str | None]:
        return {name: None if value is None else money_text(value) for name, value in self.all_figures().items()}

    def sources(self) -> dict[str, str]:
        return {name: Source(getattr(self.sums, name)).label for name in SOURCES}

    def cells(self) -> list[Any]:
        """Returns values in the order of `COLUMNS`, for tables."""
        return [
            time_text(self.start),
            *(self.group.get(name, "") for name in COST_DIMENSIONS),
            *(getattr(self.sums, name) for name in TOKEN_COLUMNS),
            *(value if value is not None else "" for value in self.amounts().values()),
            *(value if value is not None else "" for value in self.figure_texts().values()),
            *self.sources().values(),
        ]


def micro_text(amount: int) -> str:
    """Returns millionths as units: 1500000 is "1.500000"."""
    return money_text(Decimal(amount) / MILLION)


# Marginal price of batch tokens. Machines that run anyway cost the same with and without batches, so hours are
# compared: the cost of cells in an hour is modelled as a + b x tokens of other classes + c x batch tokens, with no
# coefficient below 0, and c is the marginal price. It is 0 if as many cells run at night without batches, and higher if
# cells are kept or added for them.

HOURS_LEAST = 24
BATCH_HOURS_LEAST = 6
"""Hours with batches, and hours with fewer or none, that are needed."""
ERROR_MOST = 0.5
"""Limit of the marginal price's standard error, relative to the average cost of a token."""
TERMS = 3


@dataclass(frozen=True, slots=True)
class BatchHour:
    """A settled hour. `amount` is the cost or energy of its cells, including idle time."""

    amount: float
    other_tokens: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class MarginalPrice:
    """Per million tokens, with standard error and number of hours."""

    value: Decimal
    error: Decimal
    hours: int


def marginal_price(hours: Iterable[BatchHour]) -> MarginalPrice | None:
    """Returns None if there are too few hours or they are too similar."""
    known = [hour for hour in hours if hour.amount > 0]
    with_batches = sum(hour.batch_tokens > 0 for hour in known)
    if len(known) < HOURS_LEAST or with_batches < BATCH_HOURS_LEAST:
        return None
    products, targets, square = [0.0] * 6, [0.0] * TERMS, 0.0
    for hour in known:
        of_products, of_targets = weighed((1.0, hour.other_tokens / 1e6, hour.batch_tokens / 1e6), hour.amount)
        products = [one + more for one, more in zip(products, of_products, strict=True)]
        targets = [one + more for one, more in zip(targets, of_targets, strict=True)]
        square += hour.amount
    best = solve(products, targets, square, TERMS)
    if best is None:
        return None
    value, error = best.value(2), best.error_of((0.0, 0.0, 1.0), len(known))
    average = square / sum((hour.other_tokens + hour.batch_tokens) / 1e6 for hour in known)
    if error > ERROR_MOST * average or (2 not in best.terms and not _are_terms_separable(known)):
        return None
    return MarginalPrice(Decimal(repr(round(value, 6))), Decimal(repr(round(error, 6))), len(known))


def _are_terms_separable(hours: list[BatchHour]) -> bool:
    """Whether batch amounts vary independently of the others; without that, their price is undetermined."""
    ratios = {round(hour.batch_tokens / (hour.other_tokens + 1), 3) for hour in hours}
    return len({hour.batch_tokens for hour in hours}) > 1 and len(ratios) > 1
