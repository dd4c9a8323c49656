"""Shares of regions as pages show them: a matrix for each deployment, its history, and the orders that hold."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import Any

from fleet.models import Deployment
from kernel.tones import Tone
from traffic.models import TrafficMatrix, TrafficOverride, TrafficShift
from traffic.planning.override_preview import Effect, RegionEffect
from traffic.planning.shift import ShiftKind
from traffic.planning.traffic_policy import MOST_UTILISED
from traffic.selectors.steering import active_overrides
from traffic.services.autopilot import SHIFT_TONE
from traffic.services.override import describe_order

SHIFTS_SHOWN = 20
HEAT_STEPS = 10


@dataclass(frozen=True, slots=True)
class Share:
    """One field of the matrix. `heat` 0 to 10 picks its shade; `percent` None: nothing goes there."""

    region: str
    percent: float | None
    heat: int
    home: bool


@dataclass(frozen=True, slots=True)
class OriginRow:
    origin: str
    demand: float | None
    shares: tuple[Share, ...]
    unplaced: float | None

    @property
    def watched(self) -> str:
        """What the page marks a change of: whole per cents."""
        return " ".join(f"{share.percent or 0:.0f}" for share in self.shares)


@dataclass(frozen=True, slots=True)
class Used:
    """How full a serving region is, in requests at once; `percent` None: it has no capacity."""

    region: str
    load: float
    capacity: float
    percent: float | None
    word: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class MatrixTable:
    """One deployment: a row for each origin, and how full each of its columns' regions is."""

    deployment: str
    row: TrafficMatrix
    regions: tuple[str, ...]
    rows: tuple[OriginRow, ...]
    used: tuple[Used, ...]
    cap_percent: float


@dataclass(frozen=True, slots=True)
class ShiftRow:
    shift: TrafficShift
    tone: Tone
    moved_percent: float


@dataclass(frozen=True, slots=True)
class Order:
    """An order that holds. `left_s`: until it ends by itself."""

    order: TrafficOverride
    words: str
    left_s: float


@dataclass(frozen=True, slots=True)
class EffectTable:
    """What an order would do to one deployment."""

    deployment: str
    regions: tuple[tuple[RegionEffect, Used], ...]
    unplaced: tuple[tuple[str, float], ...]
    over_cap: tuple[str, ...]


def matrix_tables() -> tuple[MatrixTable, ...]:
    """Every deployment that has shares, in one query."""
    deployments = Deployment.objects.select_related("traffic_matrix").order_by("name")
    found = ((one.name, getattr(one, "traffic_matrix", None)) for one in deployments)
    return tuple(_table(name, row) for name, row in found if row is not None and row.shares)


def shift_rows(*, limit: int = SHIFTS_SHOWN) -> tuple[ShiftRow, ...]:
    """The last changes of all deployments, youngest first."""
    return tuple(
        ShiftRow(shift, SHIFT_TONE[ShiftKind(shift.kind)], 100 * shift.moved)
        for shift in TrafficShift.objects.order_by("-id")[:limit]
    )


def orders_in_force(*, now: datetime) -> tuple[Order, ...]:
    return tuple(
        Order(order, describe_order(order), (order.expires_at - now).total_seconds()) for order in active_overrides(now)
    )


def effect_tables(effects: Iterable[Effect], cap: float = MOST_UTILISED) -> tuple[EffectTable, ...]:
    return tuple(
        EffectTable(
            deployment=effect.deployment,
            regions=tuple((one, _used(one.region, one.load_after, one.capacity, cap)) for one in effect.regions),
            unplaced=tuple(sorted(effect.unplaced.items())),
            over_cap=effect.over_cap,
        )
        for effect in effects
    )


def _table(name: str, row: TrafficMatrix) -> MatrixTable:
    figures: Mapping[str, Any] = row.figures.get("regions", {})
    unplaced: Mapping[str, float] = row.figures.get("unplaced", {})
    cap = float(row.figures.get("utilisation_cap", MOST_UTILISED))
    regions = tuple(sorted({*row.shares, *figures, *(region for shares in row.shares.values() for region in shares)}))
    return MatrixTable(
        deployment=name,
        row=row,
        regions=regions,
        rows=tuple(
            OriginRow(
                origin=origin,
                demand=figures.get(origin, {}).get("demand"),
                shares=tuple(_share(origin, region, shares.get(region, 0.0)) for region in regions),
                unplaced=unplaced.get(origin),
            )
            for origin, shares in sorted(row.shares.items())
        ),
        used=tuple(
            _used(region, one.get("load", 0.0), one.get("capacity_now", 0.0), cap)
            for region, one in ((region, figures.get(region, {})) for region in regions)
        ),
        cap_percent=100 * cap,
    )


def _share(origin: str, region: str, share: float) -> Share:
    percent = 100 * share if share > 0 else None
    return Share(region, percent, min(HEAT_STEPS, ceil(share * HEAT_STEPS)), origin == region)


def _used(region: str, load: float, capacity: float, cap: float) -> Used:
    if capacity <= 0:
        word, tone = ("no capacity", Tone.BAD) if load > 0.01 else ("no capacity", Tone.IDLE)
        return Used(region, load, 0.0, None, word, tone)
    used = load / capacity
    if used <= cap * 1.001:
        word, tone = "within its cap", Tone.OK
    elif used <= 1:
        word, tone = "above its cap", Tone.WARN
    else:
        word, tone = "overloaded", Tone.BAD
    return Used(region, load, capacity, 100 * used, word, tone)
