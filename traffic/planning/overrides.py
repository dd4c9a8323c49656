"""What operators ordered about a deployment's traffic, and what of it holds now. Pure: it says what must be, not how.

An order ends by itself at its time. Evacuating a region for real outweighs a fixed row that sends requests there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from traffic.planning.matrix import Row, whole_row


class OverrideKind(StrEnum):
    """Shares: one origin's row is fixed. Evacuation: a region serves nothing of what others can."""

    SHARES = "shares"
    EVACUATION = "evacuation"


class EvacuationMode(StrEnum):
    """A drill moves step by step, and only what fits elsewhere. For real everything leaves at once, fit or not."""

    DRILL = "drill"
    REAL = "real"


@dataclass(frozen=True, slots=True)
class OverrideView:
    """One order. `deployment` "": all. `region` is the origin of the fixed row, or the one to evacuate."""

    id: int
    kind: OverrideKind
    deployment: str
    region: str
    expires_at: datetime
    shares: Row = field(default_factory=dict)
    mode: EvacuationMode = EvacuationMode.DRILL


@dataclass(frozen=True, slots=True)
class Orders:
    """What holds for one deployment: fixed rows, regions that are closed, and those that empty as far as they can."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()
    emptying: frozenset[str] = frozenset()


def orders_for(deployment: str, overrides: Iterable[OverrideView], now: datetime) -> Orders:
    """The orders in force for a deployment; of several about one row the youngest counts."""
    there = sorted((one for one in overrides if one.deployment in ("", deployment)), key=lambda one: one.id)
    there = [one for one in there if one.expires_at > now]
    evacuated = [one for one in there if one.kind is OverrideKind.EVACUATION]
    closed = frozenset(one.region for one in evacuated if one.mode is EvacuationMode.REAL)
    rows = {}
    for one in there:
        if one.kind is OverrideKind.SHARES:
            open_shares = {region: share for region, share in one.shares.items() if region not in closed}
            if any(share > 0 for share in open_shares.values()):
                rows[one.region] = whole_row(open_shares, one.region)
    return Orders(rows, closed, frozenset(one.region for one in evacuated) - closed)
