"""The ledger as people read it. Pure, without numpy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.planning.forecast.series import LEADS, SLOT_S


@dataclass(frozen=True, slots=True)
class HorizonErrors:
    """How one method did at one horizon. `horizon_s`: until the end of the slot; `judged`: so many forecasts of the
    last 7 days; `wape`: the sum of errors over that of loads; `p90_held`: the share of slots within p90; None: not
    known. `chosen`: it forecasts there now."""

    horizon_s: int
    method: str
    judged: int
    wape: float | None
    p90_held: float | None
    chosen: bool

    @property
    def wape_percent(self) -> float | None:
        return None if self.wape is None else 100 * self.wape

    @property
    def held_percent(self) -> float | None:
        return None if self.p90_held is None else 100 * self.p90_held


def horizon_errors(ledger: Mapping[str, Any]) -> tuple[HorizonErrors, ...]:
    """Of a stored `records.Calibration`: by horizon and method; those that were never judged are left out."""
    chosen, scores = ledger.get("chosen", ()), ledger.get("scores", {})
    return tuple(
        HorizonErrors((lead + 1) * SLOT_S, method, row["count"], row["wape"], row["held"], method == chosen[number])
        for number, lead in enumerate(LEADS[: len(chosen)])
        for method, rows in scores.items()
        for row in rows[number : number + 1]
        if row["count"]
    )
