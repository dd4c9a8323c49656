"""Data of the traffic pages: share matrices, history, overrides with their effects, and the form that fixes shares."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from math import ceil
from typing import Any

from controlplane.dashboard.charts import MOST_SERIES, Chart, Series
from controlplane.dashboard.lists import Column, List
from fleet.deployments.models import Deployment
from fleet.recorder.planning.reasons import Subject
from kernel.tones import Tone
from traffic.async_requests.selectors import ingress_addresses_by_region
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficShift
from traffic.region_shares.planning.autopilot import OverrideEffect, RegionEffect, ShiftKind
from traffic.region_shares.planning.policy import MOST_UTILISED, OverrideKind
from traffic.region_shares.selectors.traffic import active_overrides
from traffic.region_shares.services.autopilot import SHIFT_TONE
from traffic.region_shares.services.overrides import describe_override

MOVED = "Share of all requests that went to another region"
HEAT_STEPS = 10
STEP_S = 60
STEPS = 6 * 60
CHARTS_SHOWN = 4
SHIFTS_READ = 2000
ChangeOfShares = tuple[float, dict[str, dict[str, float]]]
"""When the shares changed, in seconds since 1970, and what they became: origin -> region -> share."""


@dataclass(frozen=True, slots=True)
class MatrixField:
    """One field of the matrix. `heat` (0 to 10) selects its shade; `percent` is None if no requests go there."""

    region: str
    percent: float | None
    heat: int
    is_local: bool


@dataclass(frozen=True, slots=True)
class OriginRow:
    """Requests of an origin. `subject`: of decisions about them."""

    origin: str
    subject: str
    demand: float | None
    shares: tuple[MatrixField, ...]
    unplaced: float | None

    @property
    def fingerprint(self) -> str:
        """The page highlights the row when these whole per cents change."""
        return " ".join(f"{share.percent or 0:.0f}" for share in self.shares)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Utilisation of a serving region, in concurrent requests; `percent` is None if it has no capacity."""

    region: str
    load: float
    capacity: float
    percent: float | None
    state: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class MatrixTable:
    """A deployment's matrix: one row per origin, and the utilisation of each column's region."""

    deployment: str
    row: TrafficMatrix
    regions: tuple[str, ...]
    rows: tuple[OriginRow, ...]
    used: tuple[Utilisation, ...]
    cap_percent: float


@dataclass(frozen=True, slots=True)
class ShiftRow:
    shift: TrafficShift
    tone: Tone
    moved_percent: float


@dataclass(frozen=True, slots=True)
class OverrideRow:
    """An override in force. `left_s` is the time until it expires."""

    override: TrafficOverride
    description: str
    left_s: float


@dataclass(frozen=True, slots=True)
class EffectTable:
    deployment: str
    regions: tuple[tuple[RegionEffect, Utilisation], ...]
    unplaced: tuple[tuple[str, float], ...]
    over_cap: tuple[str, ...]


def matrix_tables() -> tuple[MatrixTable, ...]:
    """Returns every deployment that has shares, in one query."""
    deployments = Deployment.objects.select_related("traffic_matrix").order_by("name")
    matrices = ((one.name, getattr(one, "traffic_matrix", None)) for one in deployments)
    return tuple(_matrix_table(name, row) for name, row in matrices if row is not None and row.shares)


def _shift_rows(shifts: Sequence[TrafficShift], now: datetime) -> list[ShiftRow]:
    return [ShiftRow(shift, SHIFT_TONE[ShiftKind(shift.kind)], 100 * shift.moved) for shift in shifts]


def _override_rows(overrides: Sequence[TrafficOverride], now: datetime) -> list[OverrideRow]:
    return [
        OverrideRow(override, describe_override(override), (override.expires_at - now).total_seconds())
        for override in overrides
    ]


SHIFT_LIST: List[ShiftRow] = List(
    name="changes-of-shares",
    prefix="shifts-",
    columns=(
        Column("deployment", "Deployment", lambda row: row.shift.deployment_id, ("deployment_id",)),
        Column("kind", "Kind", lambda row: row.shift.kind, ("kind",), choices=tuple(ShiftKind)),
        Column("reason", "Reason", lambda row: row.shift.reason, ("reason",)),
        Column("moved", "Moved", lambda row: row.moved_percent, ("moved",), "number", MOVED, is_newest_first=True),
        Column("at", "When", lambda row: row.shift.at, ("at",), "number", is_newest_first=True),
    ),
    query=lambda request: TrafficShift.objects.all(),
    rows=_shift_rows,
    order=("-id",),
    find=("deployment__name", "reason"),
)
OVERRIDE_LIST: List[OverrideRow] = List(
    name="overrides",
    prefix="overrides-",
    columns=(
        Column("override", "Override", lambda row: row.description),
        Column("kind", "Kind", lambda row: row.override.kind, css="wide", choices=tuple(OverrideKind)),
        Column("why", "Reason", lambda row: row.override.why),
        Column("actor", "By", lambda row: row.override.actor, css="wide"),
        Column("since", "Since", lambda row: row.override.created_at, css="number wide", is_newest_first=True),
        Column("ends", "Ends", lambda row: row.override.expires_at, css="number"),
    ),
    query=lambda request: active_overrides(request.now),
    rows=_override_rows,
    order=("id",),
    find=("override", "why", "actor"),
    by_value=True,
)


def effect_tables(effects: Iterable[OverrideEffect], cap: float = MOST_UTILISED) -> tuple[EffectTable, ...]:
    return tuple(
        EffectTable(
            deployment=effect.deployment,
            regions=tuple(
                (one, _region_utilisation(one.region, one.load_after, one.capacity, cap)) for one in effect.regions
            ),
            unplaced=tuple(sorted(effect.unplaced.items())),
            over_cap=effect.over_cap,
        )
        for effect in effects
    )


def _matrix_table(name: str, row: TrafficMatrix) -> MatrixTable:
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
                subject=Subject.SHARE.named(f"{name}@{origin}"),
                demand=figures.get(origin, {}).get("demand"),
                shares=tuple(_matrix_field(origin, region, shares.get(region, 0.0)) for region in regions),
                unplaced=unplaced.get(origin),
            )
            for origin, shares in sorted(row.shares.items())
        ),
        used=tuple(
            _region_utilisation(region, one.get("load", 0.0), one.get("capacity_now", 0.0), cap)
            for region, one in ((region, figures.get(region, {})) for region in regions)
        ),
        cap_percent=100 * cap,
    )


def _matrix_field(origin: str, region: str, share: float) -> MatrixField:
    percent = 100 * share if share > 0 else None
    return MatrixField(region, percent, min(HEAT_STEPS, ceil(share * HEAT_STEPS)), origin == region)


def _region_utilisation(region: str, load: float, capacity: float, cap: float) -> Utilisation:
    if capacity <= 0:
        state, tone = ("no capacity", Tone.BAD) if load > 0.01 else ("no capacity", Tone.IDLE)
        return Utilisation(region, load, 0.0, None, state, tone)
    used = load / capacity
    if used <= cap * 1.001:
        state, tone = "within its cap", Tone.OK
    elif used <= 1:
        state, tone = "above its cap", Tone.WARN
    else:
        state, tone = "overloaded", Tone.BAD
    return Utilisation(region, load, capacity, 100 * used, state, tone)


def share_charts(now: datetime) -> tuple[Chart, ...]:
    """Charts the deployments whose shares changed last, in three queries. Shares are constant between two changes, so
    the last change before the charts begin is read as well."""
    rows = TrafficMatrix.objects.exclude(moved_at=None).order_by("-moved_at", "deployment_id")
    names = sorted(rows.values_list("deployment_id", flat=True)[:CHARTS_SHOWN])
    first = int(now.timestamp() // STEP_S) - STEPS + 1
    start = datetime.fromtimestamp(first * STEP_S, UTC)
    changes = TrafficShift.objects.filter(deployment_id__in=names)
    columns = ("deployment_id", "at", "shares")
    earlier = changes.filter(at__lt=start).order_by("deployment_id", "-id").distinct("deployment_id")
    later = changes.filter(at__gte=start).order_by("-id").values_list(*columns)[:SHIFTS_READ]
    shifts: dict[str, list[ChangeOfShares]] = defaultdict(list)
    for name, at, shares in (*earlier.values_list(*columns), *reversed(later)):
        shifts[name].append((at.timestamp(), shares))
    return tuple(_shares_chart(name, shifts[name], start) for name in names if shifts[name])


def _shares_chart(deployment: str, shifts: list[ChangeOfShares], start: datetime) -> Chart:
    first = int(start.timestamp() // STEP_S)
    origins = sorted({origin for _, shares in shifts for origin in shares})[:MOST_SERIES]
    lines: dict[str, list[float | None]] = {origin: [] for origin in origins}
    steps = list(accumulate((max(0, min(STEPS, int(at // STEP_S) - first)) for at, _ in shifts), max))
    for (_, shares), step, end in zip(shifts, steps, [*steps[1:], STEPS], strict=True):
        for origin, line in lines.items():
            line.extend([None] * (step - len(line)))
            line.extend([_served_elsewhere(shares, origin)] * (end - step))
    title = f"{deployment}: served in another region"
    series = tuple(Series(f"from {origin}", line) for origin, line in lines.items())
    return Chart(f"history-{deployment}", title, "% of an origin's requests", start, STEP_S, series)


def _served_elsewhere(shares: dict[str, dict[str, float]], origin: str) -> float | None:
    row = shares.get(origin)
    return None if row is None else 100 * (1 - row.get(origin, 0.0))


@dataclass(frozen=True, slots=True)
class ShareField:
    """`percent` is the text as typed, valid or not."""

    region: str
    percent: str


@dataclass(frozen=True, slots=True)
class SharesForm:
    """`deployment` and `origin` are those of the request, or the first that exist. No fields if nothing can be
    fixed."""

    deployment: str
    origin: str
    deployments: tuple[str, ...]
    origins: tuple[str, ...]
    fields: tuple[ShareField, ...]


def shares_form(deployment: str, origin: str, percents: Mapping[str, str]) -> SharesForm:
    """Makes three queries. Unknown names are kept, so that the error can name them."""
    deployments = tuple(Deployment.objects.order_by("name").values_list("name", flat=True))
    regions = tuple(sorted(ingress_addresses_by_region()))
    deployment = deployment or next(iter(deployments), "")
    origin = origin or next(iter(regions), "")
    now = _percents_now(deployment, origin)
    fields = tuple(ShareField(region, percents.get(region, now.get(region, "0"))) for region in regions)
    return SharesForm(deployment, origin, deployments, regions, fields if deployments else ())


def _percents_now(deployment: str, origin: str) -> dict[str, str]:
    """Returns whole per cents that sum to 100, so that the form is valid as it is."""
    row = TrafficMatrix.objects.filter(deployment_id=deployment).first()
    shares: dict[str, float] = (row.shares.get(origin) if row else None) or {origin: 1.0}
    whole = {region: round(100 * share) for region, share in shares.items()}
    largest = max(whole, key=lambda region: whole[region])
    whole[largest] += 100 - sum(whole.values())
    return {region: str(percent) for region, percent in whole.items()}
