"""Decides for which deployment and region an incident says that no cell there can serve, or that the autopilot sends
all requests elsewhere. Pure.

Only what nobody wanted counts: a place that is scaled to zero, evacuated, or that never had a usable cell has no
incident, and cells that the disruption ledger took down explain their own absence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleet.planning.states import CellState

OPEN_AFTER_S = 5.0
CLOSE_AFTER_S = 10.0
"""A region that comes and goes has one incident, not one a second."""
SEEN_AFTER_S = 15.0
"""An ingress sees a cell that has become ready within a few seconds: table, health check, report."""
UP = "up"
CELLS_NAMED = 20


@dataclass(frozen=True, slots=True)
class CellStanding:
    """A cell of the place. `on_purpose`: the disruption ledger says why it is down. `views`: ingress -> its view."""

    id: str
    state: CellState
    since: datetime
    reason: str = ""
    on_purpose: bool = False
    views: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self.state is CellState.READY and all(view == UP for view in self.views.values())

    def is_missed(self, now: datetime) -> bool:
        """Whether it should serve, does not, and nothing planned says why."""
        if self.on_purpose or self.state is CellState.DRAINING or self.is_up:
            return False
        return self.state is not CellState.READY or (now - self.since).total_seconds() >= SEEN_AFTER_S


@dataclass(frozen=True, slots=True)
class Place:
    """A deployment in a region that has an ingress.

    `wanted`: cells that there should be. `capacity`: requests at once of the cells that every ingress sees. `emptied`:
    the autopilot sends none of the region's own requests there, and no operator ordered that. `elsewhere`: regions that
    serve the deployment. `refused`: code -> requests that no cell answered, in all. `served`, `since`,
    `refused_before`: what was noted at the last look: whether a cell was usable since cells are wanted, since when none
    is, and what had been refused then.
    """

    deployment: str
    region: str
    wanted: int
    capacity: float
    emptied: bool
    closed: bool
    cells: tuple[CellStanding, ...] = ()
    elsewhere: tuple[str, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    served: bool = False
    since: datetime | None = None
    refused_before: Mapping[str, int] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return f"{self.deployment}@{self.region}"

    @property
    def is_intended(self) -> bool:
        """Whether nothing is to be served here."""
        return self.wanted == 0 or self.closed


@dataclass(frozen=True, slots=True)
class Noted:
    """What the next look is to know."""

    served: bool
    since: datetime | None
    refused_before: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Unserved:
    """The incident that there should be."""

    summary: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Judgement:
    """`unserved`: None: there is nothing to report; `resolution` says why, where an incident would close."""

    noted: Noted
    unserved: Unserved | None = None
    resolution: str = ""


def judge_place(place: Place, now: datetime) -> Judgement:
    """Whether the place is without a usable cell, for how long, and with which evidence."""
    if place.is_intended:
        why = "the region is evacuated" if place.closed else "no cell is wanted there"
        # What served before an evacuation is not cold after it.
        return Judgement(Noted(place.served and place.wanted > 0, None, {}), resolution=why)
    if place.capacity > 0 and not place.emptied:
        return Judgement(Noted(True, None, {}), resolution="its cells serve again")
    missed = [cell for cell in place.cells if cell.is_missed(now)]
    if not place.served or (place.capacity <= 0 and not missed):
        return Judgement(Noted(place.served, None, {}), resolution="its cells are down on purpose")
    since = place.since or now
    before = place.refused_before if place.since is not None else place.refused
    noted = Noted(True, since, before)
    if (now - since).total_seconds() < OPEN_AFTER_S:
        return Judgement(noted)
    return Judgement(noted, _unserved(place, missed, since, before))


def _unserved(place: Place, missed: list[CellStanding], since: datetime, before: Mapping[str, int]) -> Unserved:
    refused = {
        code: count - before.get(code, 0) for code, count in place.refused.items() if count > before.get(code, 0)
    }
    what = (
        f"No cell of {place.deployment} in {place.region} can serve"
        if place.capacity <= 0
        else f"The autopilot sends all requests for {place.deployment} away from {place.region}, which has cells"
    )
    helpers = f"requests go to {', '.join(place.elsewhere)}" if place.elsewhere else "no region serves it"
    count = sum(refused.values())
    lost = f"{count} requests failed since" if count else "no request failed yet"
    named = missed or place.cells
    evidence = {
        "since": since.isoformat(),
        "wanted": place.wanted,
        "served_by": list(place.elsewhere),
        "refused": refused,
        "cells": [_as_evidence(cell) for cell in named[:CELLS_NAMED]],
    }
    return Unserved(f"{what}: {_said(named)}; {helpers}; {lost}", evidence)


def _said(cells: Iterable[CellStanding]) -> str:
    first = next(iter(cells), None)
    if first is None:
        return "there is none"
    views = sorted({view for view in first.views.values() if view != UP})
    seen = f", {' and '.join(views)} at its ingresses" if views else ""
    return f"{first.id} is {first.state}{seen}" + (f" ({first.reason})" if first.reason else "")


def _as_evidence(cell: CellStanding) -> dict[str, Any]:
    return {
        "cell": cell.id,
        "state": str(cell.state),
        "since": cell.since.isoformat(),
        "reason": cell.reason,
        "ingresses": dict(cell.views),
    }
