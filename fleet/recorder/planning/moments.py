"""The fleet as it was at a time between two recorded rounds. The second round's snapshot has every change that the
reconciler made until then; where an object changed after the time, the first round's snapshot has its earlier state.
Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView, RolloutView
from fleet.reconcile.planning.states import CellState

Row = TypeVar("Row", CellView, NodeView, RolloutView)


@dataclass(frozen=True, slots=True)
class Moment:
    """States at `at`. Cells and nodes are ordered as planners see them; `wanted`: (deployment, region) -> cells."""

    at: datetime
    cells: tuple[CellView, ...]
    nodes: tuple[NodeView, ...]
    rollouts: tuple[RolloutView, ...]
    wanted: Mapping[tuple[str, str], int]

    def places(self) -> Iterator["PlaceThen"]:
        """Deployments in their regions, by name."""
        states: dict[tuple[str, str], Counter[CellState]] = {place: Counter() for place in self.wanted}
        for cell in self.cells:
            states.setdefault((cell.deployment, cell.region), Counter())[cell.state] += 1
        for place in sorted(states):
            yield PlaceThen(*place, self.wanted.get(place, 0), states[place])


@dataclass(frozen=True, slots=True)
class PlaceThen:
    deployment: str
    region: str
    wanted: int
    states: Mapping[CellState, int]

    @property
    def ready(self) -> int:
        return self.states.get(CellState.READY, 0)


def fleet_at(before: FleetView | None, after: FleetView, at: datetime) -> Moment:
    """`before`: the last snapshot at or before `at`, if any; `after`: the first one later."""
    earlier = before or FleetView({}, {}, {}, {}, None)
    wanted = (earlier if before else after).deployments
    return Moment(
        at,
        tuple(_states_at(earlier.cells, after.cells, at)),
        tuple(_states_at(earlier.nodes, after.nodes, at)),
        tuple(_states_at(earlier.rollouts, after.rollouts, at)),
        {(name, region): cells for name, spec in wanted.items() for region, cells in spec.cells_wanted.items()},
    )


def _states_at(before: Mapping[str, Row], after: Mapping[str, Row], at: datetime) -> Iterator[Row]:
    for name, row in after.items():
        if row.state_since <= at:
            yield row
        elif name in before:
            yield before[name]
