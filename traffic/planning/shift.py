"""What the region autopilot looks at, what it can decide, and the figures it decides by. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from traffic.planning.matrix import Matrix, Row
from traffic.planning.overrides import OverrideView
from traffic.planning.traffic_policy import TrafficPolicy


@dataclass(frozen=True, slots=True)
class AutopilotSettings:
    """Shares are of an origin's requests, `_s` seconds. All are from design.md §5 but the last three, which are ours:

    `step_every_s` is the time in which a step's effect is seen, reports and averages included. `fallen_share`: a region
    that lost more than a third of its capacity within a minute goes bad; one that lost a cell of four does not. While
    not everything fits, relief must take at least `worth_relief` of a region's capacity off it to be worth a jump.
    """

    stale_after_s: float = 15.0
    step: float = 0.10
    dead_band: float = 0.01
    step_every_s: float = 10.0
    fallen_share: float = 1 / 3
    worth_relief: float = 0.02


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region that has an ingress. `demand` and capacities are requests at once, `share_lost` is of the last minute
    (see `windows`). `reported_at`: the last report of its ingress that was silent longest; None: one never reported.
    `starting`: it has no capacity yet, and nothing is known of it; its ingress spills by itself until it has.
    `returned`: it had no cell within that minute, once, and has some again."""

    name: str
    demand: float
    capacity: float
    capacity_now: float
    share_lost: float
    reported_at: datetime | None
    starting: bool = False
    returned: bool = False


@dataclass(frozen=True, slots=True)
class TrafficView:
    """All that is decided upon for one deployment. `in_force` has no row of an origin that is new."""

    deployment: str
    regions: tuple[RegionView, ...]
    in_force: Matrix
    moved_at: datetime | None
    policy: TrafficPolicy
    overrides: tuple[OverrideView, ...]
    latency_ms: Mapping[tuple[str, str], float]


class ShiftKind(StrEnum):
    """Why requests move: there was no plan, an operator ordered it, a region cannot carry them, their own region has
    cells again, or it is better so."""

    FIRST = "first"
    ORDERED = "ordered"
    RELIEF = "relief"
    RETURN = "return"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class ShiftTraffic:
    """Take this matrix. `moved` is the share of all requests that goes to another region than before."""

    deployment: str
    matrix: Matrix
    kind: ShiftKind
    moved: float
    reason: str


@dataclass(frozen=True, slots=True)
class HoldTable:
    """Leave the last matrix as it is, though it may be wrong."""

    deployment: str
    reason: str


Decision = ShiftTraffic | HoldTable


def describe_rows(before: Matrix, after: Matrix) -> str:
    """What changes, one part for each origin whose row does; empty if none does."""
    changed = [origin for origin in after if before.get(origin) != after[origin]]
    return "; ".join(f"{origin} -> {_shares(after[origin])}" for origin in changed)


def _shares(row: Row) -> str:
    return ", ".join(f"{region} {share:.1%}" for region, share in sorted(row.items(), key=lambda one: -one[1]))
