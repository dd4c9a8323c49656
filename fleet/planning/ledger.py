"""The disruption ledger: whether one more cell may be taken down on purpose, by the same rule for every cause.

Pure. Planners ask it of a snapshot; services ask the same function again of the rows that they hold locked. A cell is
available once it has been ready for `min_healthy_s` of its deployment's policy.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from fleet.planning.role_split import answers
from fleet.planning.snapshot import CellView, FleetView
from fleet.planning.states import CellState, DisruptionCause


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """How many cells of all deployments together may be down on purpose: a share of those wanted, or the floor.

    A tenth is what LWS and ECS users commonly allow one service; the floors let two small deployments move at once.
    """

    region_share: float = 0.10
    region_floor: int = 2
    fleet_share: float = 0.10
    fleet_floor: int = 4

    def region(self, wanted: int) -> int:
        return max(self.region_floor, int(self.region_share * wanted))

    def fleet(self, wanted: int) -> int:
        return max(self.fleet_floor, int(self.fleet_share * wanted))


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """What one more disruption starts from, in cells. `open`: down on purpose.

    The first three count the deployment, `…_here` its cells in the cell's region, `region_…` and `fleet_…` all
    deployments and no disruptions for scaling. `is_available`: the cell itself is one of the available.
    `available_prefill`: those of the available that answer nobody; `is_prefill`: the cell itself is such.
    """

    wanted: int
    available: int
    open: int
    wanted_here: int
    available_here: int
    region_wanted: int
    region_open: int
    fleet_wanted: int
    fleet_open: int
    is_available: bool
    available_prefill: int = 0
    is_prefill: bool = False


def refusal(counts: LedgerCounts, cause: DisruptionCause, max_unavailable: int, limits: LedgerLimits) -> str | None:
    """Why this cell may not be taken down now; None: it may (I1, I10).

    What makes room for others goes at the pace of its policy, and counts against the budgets even where no cell is
    missing by it: many deployments may have to make room at once.
    """
    left = counts.available - counts.is_available
    left_here = counts.available_here - counts.is_available
    answering = left - counts.available_prefill + (counts.is_available and counts.is_prefill)
    if counts.wanted > 0 and answering < 1:
        return "no other cell of the deployment is available" + (", but for such that read prompts" if left else "")
    short, short_here = counts.wanted - left, counts.wanted_here - left_here
    if min(counts.open + 1, short) > max_unavailable:
        return f"{counts.open} cells of the deployment are down on purpose, at most {max_unavailable} may be"
    makes_room = cause is DisruptionCause.PREEMPTION
    if makes_room and counts.open >= max(1, max_unavailable):
        return f"{counts.open} cells of the deployment are down on purpose, and make room one by one"
    if short_here > (0 if makes_room or cause is DisruptionCause.SCALE else max_unavailable):
        return f"{counts.available_here} of {counts.wanted_here} cells in the region are available"
    is_budgeted = short_here > 0 or makes_room
    if is_budgeted and counts.region_open >= limits.region(counts.region_wanted):
        return f"{counts.region_open} cells of the region are down on purpose, which is its budget"
    if is_budgeted and counts.fleet_open >= limits.fleet(counts.fleet_wanted):
        return f"{counts.fleet_open} cells of the fleet are down on purpose, which is its budget"
    return None


class Ledger:
    """The ledger of one pass: what the snapshot says, and what this pass has charged on top."""

    def __init__(self, fleet: FleetView, limits: LedgerLimits, now: datetime) -> None:
        self._fleet = fleet
        self._limits = limits
        self._available: set[str] = {cell.id for cell in fleet.cells.values() if self._counts(cell, now)}
        self._ready_here: Counter[tuple[str, str]] = Counter()
        self._ready: Counter[str] = Counter()
        self._ready_prefill: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._region_open: Counter[str] = Counter()
        for cell in fleet.cells.values():
            self._add_available(cell, int(cell.id in self._available))
            if cell.disruption is not None:
                self._add_open(cell, cell.disruption)
        self._region_wanted: Counter[str] = Counter()
        for deployment in fleet.deployments.values():
            self._region_wanted.update(deployment.cells_wanted)

    def refusal(self, cell: CellView, cause: DisruptionCause) -> str | None:
        """Why a ready cell may not be taken down now."""
        deployment = self._fleet.deployments[cell.deployment]
        counts = LedgerCounts(
            wanted=sum(deployment.cells_wanted.values()),
            available=self._ready[cell.deployment],
            open=self._open[cell.deployment],
            wanted_here=deployment.cells_wanted.get(cell.region, 0),
            available_here=self._ready_here[cell.deployment, cell.region],
            region_wanted=self._region_wanted[cell.region],
            region_open=self._region_open[cell.region],
            fleet_wanted=self._region_wanted.total(),
            fleet_open=self._region_open.total(),
            is_available=cell.id in self._available,
            available_prefill=self._ready_prefill[cell.deployment],
            is_prefill=not answers(cell.role),
        )
        return refusal(counts, cause, self._fleet.policy_of(cell.deployment).max_unavailable, self._limits)

    def charge(self, cell: CellView, cause: DisruptionCause) -> None:
        """This cell is taken down by this pass."""
        self._add_available(cell, -int(cell.id in self._available))
        self._available.discard(cell.id)
        self._add_open(cell, cause)

    def is_available(self, cell: CellView) -> bool:
        return cell.id in self._available

    def _counts(self, cell: CellView, now: datetime) -> bool:
        settle_s = self._fleet.policy_of(cell.deployment).min_healthy_s
        return cell.state is CellState.READY and (now - cell.state_since).total_seconds() >= settle_s

    def _add_available(self, cell: CellView, number: int) -> None:
        self._ready_here[cell.deployment, cell.region] += number
        self._ready[cell.deployment] += number
        self._ready_prefill[cell.deployment] += 0 if answers(cell.role) else number

    def _add_open(self, cell: CellView, cause: DisruptionCause) -> None:
        self._open[cell.deployment] += 1
        if cause is not DisruptionCause.SCALE:
            self._region_open[cell.region] += 1
