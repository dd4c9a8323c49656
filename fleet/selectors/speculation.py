"""What the engines of cells guessed and accepted in the last hour, as their leaders report it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fleet.models import Cell, NodeReport
from fleet.planning.drift import Guessing
from fleet.planning.states import CellState
from models_registry.selectors.calibration import chains_expected

FRESH_FOR = timedelta(seconds=15)
"""What was reported before says nothing about now."""
MOST = 2**53
"""No count that is meant is as large."""


@dataclass(frozen=True, slots=True)
class CellGuesses:
    """What a cell's engine guessed in the last `covered_s`."""

    cell: Cell
    covered_s: float
    drafts: int
    guessed: int
    accepted: int


def cell_guesses(now: datetime) -> list[CellGuesses]:
    """Of every cell whose leader lately said so of it, in two queries."""
    reports = NodeReport.objects.filter(
        load__has_key="speculation", last_seen_at__gt=now - FRESH_FOR, node__member__rank=0
    ).exclude(load__speculation=None)
    rows = reports.values_list("node__member__cell_id", "cell", "load__speculation")
    said = {cell: load for cell, reported, load in rows if cell == reported and isinstance(load, dict)}
    if not said:
        return []
    cells = Cell.objects.filter(pk__in=said).exclude(state=CellState.STOPPED.value).select_related("model_version")
    return [_of(cell, said[cell.pk]) for cell in cells.order_by("pk")]


def _of(cell: Cell, load: Mapping[str, Any]) -> CellGuesses:
    drafts, guessed, accepted = (
        max(0, min(int(load.get(name, 0)), MOST)) for name in ("drafts", "guessed_tokens", "accepted_tokens")
    )
    return CellGuesses(cell, float(load.get("covered_s", 0.0)), drafts, guessed, accepted)


def guessing_calibrated(now: datetime) -> Iterator[Guessing]:
    """Those whose version is calibrated, with what the newest calibration expects."""
    found = cell_guesses(now)
    chains = chains_expected({each.cell.model_version_id for each in found}) if found else {}
    for each in found:
        if each.cell.model_version_id in chains:
            yield Guessing(
                each.cell.deployment_id,
                each.cell.model_version.reference,
                each.covered_s,
                each.drafts,
                each.guessed,
                each.accepted,
                chains[each.cell.model_version_id],
            )
