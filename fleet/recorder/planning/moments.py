"""The fleet as it was at a time between two recorded rounds. The second round's snapshot has every change that the
reconciler made until then; where an object changed after the time, the first round's snapshot has its earlier state.
Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Protocol, TypeVar

from fleet.reconcile.planning.states import CellState
from fleet.recorder.planning.states_then import CellThen, NodeThen, RolloutThen, StatesThen, TargetThen

Row = TypeVar("Row", CellThen, NodeThen, RolloutThen)


class States(Protocol):
    """Those of a snapshot, or the present ones, which may be loaded when they are read."""

    @property
    def cells(self) -> Mapping[str, CellThen]: ...

    @property
    def nodes(self) -> Mapping[str, NodeThen]: ...

    @property
    def rollouts(self) -> Mapping[str, RolloutThen]: ...

    @property
    def deployments(self) -> Mapping[str, TargetThen]: ...


@dataclass(frozen=True)
class Moment:
    """States at `at`. `before`: of the last snapshot at or before it, if any; `after`: of the first one later. Rows are
    in the order of the planners."""

    at: datetime
    before: States | None
    after: States

    @cached_property
    def cells(self) -> tuple[CellThen, ...]:
        return tuple(self._rows(self._earlier.cells, self.after.cells))

    @cached_property
    def nodes(self) -> tuple[NodeThen, ...]:
        return tuple(self._rows(self._earlier.nodes, self.after.nodes))

    @cached_property
    def rollouts(self) -> tuple[RolloutThen, ...]:
        return tuple(self._rows(self._earlier.rollouts, self.after.rollouts))

    @cached_property
    def wanted(self) -> dict[tuple[str, str], int]:
        """(deployment, region) -> cells."""
        targets = (self.before or self.after).deployments
        return {(name, region): cells for name, one in targets.items() for region, cells in one.cells_wanted.items()}

    @property
    def _earlier(self) -> States:
        return self.before or StatesThen()

    def _rows(self, before: Mapping[str, Row], after: Mapping[str, Row]) -> Iterator[Row]:
        at = self.at
        for name, row in after.items():
            if row.state_since <= at:
                yield row
            elif name in before:
                yield before[name]

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
