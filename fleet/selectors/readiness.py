"""Whether the fleet is what it should be, and what it waits for."""

from collections import Counter
from dataclasses import dataclass, replace

from fleet.models import Cell, DeploymentRegion, Node
from fleet.planning.states import CellState, NodeState


@dataclass(frozen=True, slots=True)
class Readiness:
    """`waiting_for` is empty when everything wanted is there."""

    summary: str
    waiting_for: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        return not self.waiting_for

    def plus(self, more: tuple[str, ...]) -> "Readiness":
        """The same, waiting for more."""
        return replace(self, waiting_for=(*self.waiting_for, *more), summary="; ".join((self.summary, *more)))


def fleet_readiness() -> Readiness:
    """Compare wanted with ready cells, and say of every other cell what holds it up."""
    ready: Counter[tuple[str, str]] = Counter()
    held_up = []
    for cell in Cell.objects.exclude(state=CellState.STOPPED):
        if cell.state == CellState.READY:
            ready[cell.deployment_id, cell.region_id] += 1
        else:
            held_up.append(f"{cell.id} is {cell.state}: {cell.reason}")
    wanted = DeploymentRegion.objects.all()
    short = [
        f"{row.deployment_id} in {row.region_id}: {ready[row.deployment_id, row.region_id]} of {row.cells} ready"
        for row in wanted
        if ready[row.deployment_id, row.region_id] < row.cells
    ]
    nodes = Node.objects.filter(state=NodeState.READY).count()
    total = sum(row.cells for row in wanted)
    there = sum(min(ready[row.deployment_id, row.region_id], row.cells) for row in wanted)
    summary = f"{there} of {total} cells ready, {nodes} nodes joined"
    return Readiness(summary=summary, waiting_for=tuple(short + held_up) if short else ())
