"""Decides which role a cell has when it starts next, and which serving cells go down now to come back in another one.
Pure; it counts what it has given out in this pass.

A role is like a version: a cell keeps it as long as no more of that role are there than its place should have. What
starts anyway takes a role that is missing; only what is missing then is taken down for, under the disruption ledger.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine_agent.protocol.messages import DECODE_NODES_MAX, PREFILL_CELLS_MAX
from engine_agent.protocol.states import CellRole
from fleet.planning.decisions import DrainCell
from fleet.planning.ledger import Ledger
from fleet.planning.role_split import RoleSplit, beyond, counted, most_lacking, next_to_move
from fleet.planning.snapshot import CellView, FleetView
from fleet.planning.states import CellState, DisruptionCause

Place = tuple[str, str]
"""Deployment, region."""
HOLDING = frozenset({CellState.READY, CellState.STARTING})
"""Cells whose role stands; all others take one when they start."""


class RolePlan:
    """The roles of one pass. `live`: the cells that stay, by place."""

    def __init__(self, fleet: FleetView, live: Mapping[Place, list[CellView]]) -> None:
        self._fleet = fleet
        self._live = live
        self._given: dict[Place, list[CellRole]] = {}
        """Roles of cells that stand, and of those that got one in this pass."""
        self._beyond: dict[Place, list[CellRole]] = {}
        """Of those that are created beyond what is wanted."""

    def wanted(self, place: Place) -> RoleSplit:
        """How many cells of each role a place should have."""
        return self._fleet.deployments[place[0]].split(place[1])

    def are_apart(self, place: Place) -> bool:
        """Whether a place has cells that are not mixed, or should have some."""
        wanted = self.wanted(place).is_apart
        return wanted or any(cell.role is not CellRole.MIXED for cell in self._live.get(place, ()))

    def leave(self, place: Place, cells: Iterable[CellView]) -> None:
        """These cells of a place, whose machines end, hold their roles no longer: others come in their stead."""
        given = self._roles(place)
        for cell in cells:
            if cell.state in HOLDING:
                given.remove(cell.role)

    def of(self, cell: CellView, version: str) -> CellRole:
        """The role that this cell has if it is started now with this version."""
        place = (cell.deployment, cell.region)
        given, wanted = self._roles(place), self.wanted(place)
        if cell.state in HOLDING and cell.role in given:
            given.remove(cell.role)
        role = cell.role
        if not self._fleet.deployments[cell.deployment].of(version).hands_over:
            role = CellRole.MIXED
        elif given.count(role) >= wanted.of(role) or (wanted.decode and CellRole.DECODE not in given):
            role = most_lacking(counted(given), wanted) or role
        given.append(role)
        return role

    def of_new(self, place: Place, version: str, goal: str = "") -> CellRole:
        """The role of a cell that is created. `goal`: it comes beyond what is wanted, for a rollout to that version."""
        given, wanted = self._roles(place), self.wanted(place)
        if not self._fleet.deployments[place[0]].of(version).hands_over:
            role = CellRole.MIXED
        elif goal:
            created = self._beyond.setdefault(place, [])
            role = next(iter(next_to_move(self.at(place, goal, created), wanted)), CellRole.MIXED)
            created.append(role)
        else:
            role = most_lacking(counted(given), wanted) or CellRole.MIXED
        given.append(role)
        return role

    def at(self, place: Place, version: str, more: Iterable[CellRole] = ()) -> RoleSplit:
        """The roles of the cells that run a version, or are on their way down to come back with it, with some more."""
        cells = self._live.get(place, ())
        return counted([*(cell.role for cell in cells if cell.version == version or cell.returns), *more])

    def _roles(self, place: Place) -> list[CellRole]:
        if place not in self._given:
            cells = self._live.get(place, ())
            self._given[place] = [cell.role for cell in cells if cell.state in HOLDING]
        return self._given[place]


def in_turn(cells: Iterable[CellView], moved: RoleSplit, wanted: RoleSplit) -> Iterator[CellView]:
    """Cells in the order in which a rollout moves them, the oldest of a role first."""
    left = sorted(cells, key=lambda cell: (cell.created_at, cell.id))
    at = {role: moved.of(role) for role in CellRole}
    while left:
        split = RoleSplit(at[CellRole.MIXED], at[CellRole.PREFILL], at[CellRole.DECODE])
        turn = next_to_move(split, wanted)
        cell = next((one for role in turn for one in left if one.role is role), left[0])
        left.remove(cell)
        at[cell.role] += 1
        yield cell


def plan_role_changes(
    fleet: FleetView, roles: RolePlan, live: Mapping[Place, list[CellView]], ledger: Ledger, leaving: set[str]
) -> Iterator[DrainCell]:
    """Cells to drain so that they come back in the role that is missing; none while a rollout moves cells, whose gates
    compare cells of equal roles."""
    for place in sorted(live):
        deployment = fleet.deployments[place[0]]
        if deployment.problem or place[0] in fleet.rollouts or not roles.are_apart(place):
            continue
        cells = [cell for cell in live[place] if cell.id not in leaving]
        wanted = deployment.split(place[1])
        if len(cells) != wanted.total:
            continue
        yield from _changes([cell for cell in cells if cell.state in HOLDING], wanted, ledger)


def _changes(cells: list[CellView], wanted: RoleSplit, ledger: Ledger) -> Iterator[DrainCell]:
    there = counted(cell.role for cell in cells)
    for role in _to_change(there, wanted):
        surplus = max(1, there.of(role) - wanted.of(role))
        ready = [cell for cell in cells if cell.role is role and cell.state is CellState.READY]
        for cell in sorted(ready, key=lambda one: (one.created_at, one.id))[:surplus]:
            if ledger.refusal(cell, DisruptionCause.ROLE) is not None:
                break
            ledger.charge(cell, DisruptionCause.ROLE)
            reason = f"its place should have {wanted}, and has {there}"
            yield DrainCell(cell.id, cell.generation, DisruptionCause.ROLE, reason)


def _to_change(there: RoleSplit, wanted: RoleSplit) -> list[CellRole]:
    """Roles of which cells are to become others. The last cell that answers cannot; a prefill cell comes back as a
    decode cell in its stead, and then it can."""
    if wanted.decode and not there.decode and there.answering == 1 and there.prefill:
        return [CellRole.PREFILL]
    return sorted(beyond(there, wanted))


# Decides which prefill cells a decode cell may call, and whom a prefill cell may be called by: cells of one place
# whose KV layouts are equal.
# Never two of different layouts, whatever a rollout is at: a decode cell without a prefill cell of its own layout
# does all by itself.


@dataclass(frozen=True, slots=True)
class PairingCell:
    """A cell apart that runs. `layout`: the fingerprint of what it hands over, never empty; `node`: its leader;
    `serves`: it takes new work."""

    id: str
    role: CellRole
    layout: str
    node: str
    serves: bool


def prefill_cells_of(decode: PairingCell, there: Iterable[PairingCell]) -> tuple[PairingCell, ...]:
    """Those of the cells of its place that this decode cell may call."""
    found = (
        one
        for one in there
        if one.role is CellRole.PREFILL and one.serves and one.layout and one.layout == decode.layout
    )
    return tuple(sorted(found, key=lambda one: one.id)[:PREFILL_CELLS_MAX])


def decode_nodes_of(prefill: PairingCell, there: Iterable[PairingCell]) -> tuple[str, ...]:
    """The nodes whose proxies may call this prefill cell: they may still do so while they drain."""
    found = {one.node for one in there if one.role is CellRole.DECODE and one.layout and one.layout == prefill.layout}
    return tuple(sorted(found)[:DECODE_NODES_MAX])
