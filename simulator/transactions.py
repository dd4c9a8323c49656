"""What becomes of a write to the simulated rows: it is committed, it was stale, or who writes is killed before it."""

from dataclasses import dataclass
from datetime import datetime

from fleet.planning.decisions import Decision
from fleet.planning.snapshot import CellView, RolloutView


class StaleWrite(Exception):
    """What the decision saw is no longer so."""


class ProcessKilled(Exception):
    """The process that writes ends here."""


@dataclass(frozen=True, slots=True)
class Write:
    """One transaction that was committed: why, and the cell or the rollout before and after if it changed one."""

    cause: Decision | str
    at: datetime
    before: CellView | None = None
    after: CellView | None = None
    rollout_before: RolloutView | None = None
    rollout_after: RolloutView | None = None
