"""In which order cells get machines when there are too few. The one place that says so: quotas are filled, new cells
placed and cells taken away in this order or its reverse. Pure.

First the cells that no one may take away: those below a floor that is not preemptible. Then all others. Each by
priority; of one priority those below a floor first, and then so that each deployment has the same part of what was set.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fleet.planning.claims import PRIORITY_MOST, ClaimView, SharingPolicy
from fleet.planning.markets import Markets
from fleet.planning.snapshot import CellView, DeploymentView, FleetView

Place = tuple[str, str]
"""Deployment, region."""
Turn = tuple[int, int, bool, float, str, str]


@dataclass(frozen=True, slots=True)
class Lack:
    """A cell that waits for `machines` more."""

    cell: CellView
    machines: int


@dataclass(frozen=True, slots=True)
class Share:
    """A deployment in a region. `size`: machines of a cell; `holding`: cells that have theirs and are not on their way
    out; `lacking`: cells that wait for some, those that lack least first; `vacating`: machines of cells that leave."""

    deployment: str
    region: str
    instance_type: str
    size: int
    claim: ClaimView
    policy: SharingPolicy
    team: str
    markets: Markets
    max_unavailable: int
    holding: int
    lacking: tuple[Lack, ...]
    vacating: int

    @property
    def place(self) -> Place:
        return self.deployment, self.region

    @property
    def pool(self) -> tuple[str, str]:
        return self.region, self.instance_type

    @property
    def priority(self) -> int:
        return self.policy.priority or 0

    @property
    def floor(self) -> int:
        return self.claim.least

    @property
    def kept(self) -> int:
        """Cells that stay if nothing is taken: those with machines, as far as they should be there."""
        return min(self.claim.in_force, self.holding)

    @property
    def surplus(self) -> int:
        """Cells with machines beyond those that should be there."""
        return self.holding - self.kept

    def turn(self, number: int) -> Turn:
        """When the cell of this number, from 0, gets its machines: less is sooner."""
        fraction = (number + 1) / max(1, self.claim.asked)
        return *turn_of(self.policy, number, self.floor), number >= self.floor, fraction, self.deployment, self.region


def turn_of(policy: SharingPolicy, number: int, floor: int) -> tuple[int, int]:
    """Whether a cell may be taken away at all, and how far its priority is from the highest."""
    return int(number >= floor or bool(policy.preemptible)), PRIORITY_MOST - (policy.priority or 0)


def cells_in_turn(fleet: FleetView, waiting: Collection[str]) -> dict[str, Turn]:
    """The turn of each of these cells, which wait for machines."""
    if not waiting:
        return {}
    having: Counter[Place] = Counter()
    for cell in fleet.cells.values():
        having[cell.deployment, cell.region] += cell.id not in waiting and not cell.is_leaving
    turns: dict[str, Turn] = {}
    for cell in fleet.cells.values():
        if cell.id in waiting:
            place = (cell.deployment, cell.region)
            turns[cell.id] = _bare_share(fleet.deployments[cell.deployment], cell.region).turn(having[place])
            having[place] += 1
    return turns


def shares_of(fleet: FleetView) -> dict[Place, Share]:
    """Every place of a deployment of which something sensible is known, and whose cells are of one type: who may be on
    another goes there instead of taking machines, and gives none."""
    cells: dict[Place, list[CellView]] = {}
    for cell in fleet.cells.values():
        cells.setdefault((cell.deployment, cell.region), []).append(cell)
    sound = [spec for spec in fleet.deployments.values() if not spec.problem and not spec.further]
    places = {(spec.name, region) for spec in sound for region in spec.cells_wanted}
    names = {spec.name for spec in sound}
    places |= {place for place in cells if place[0] in names}
    return {place: _share(fleet, place, cells.get(place, [])) for place in sorted(places)}


def _share(fleet: FleetView, place: Place, cells: list[CellView]) -> Share:
    spec = fleet.deployments[place[0]]
    staying = [cell for cell in cells if not cell.is_leaving]
    lacking = [lack for cell in staying if (lack := _lack(fleet, cell)) is not None]
    waiting = {lack.cell.id for lack in lacking}
    lacking.sort(key=lambda lack: (lack.machines, lack.cell.state_since, lack.cell.id))
    return _bare_share(
        spec,
        place[1],
        max_unavailable=fleet.policy_of(spec.name).max_unavailable,
        holding=sum(cell.id not in waiting for cell in staying),
        lacking=tuple(lacking),
        vacating=sum(len(cell.members) for cell in cells if cell.is_leaving),
    )


def _bare_share(
    spec: DeploymentView,
    region: str,
    *,
    max_unavailable: int = 1,
    holding: int = 0,
    lacking: tuple[Lack, ...] = (),
    vacating: int = 0,
) -> Share:
    return Share(
        deployment=spec.name,
        region=region,
        instance_type=spec.instance_type,
        size=spec.nodes_per_cell,
        claim=spec.claim(region),
        policy=spec.sharing,
        team=spec.team,
        markets=spec.markets,
        max_unavailable=max_unavailable,
        holding=holding,
        lacking=lacking,
        vacating=vacating,
    )


def _lack(fleet: FleetView, cell: CellView) -> Lack | None:
    short = fleet.machines_lacking(cell)
    return Lack(cell, short) if short else None


def by_pool(shares: Mapping[Place, Share]) -> dict[tuple[str, str], list[Share]]:
    """Those that want machines of the same region and type."""
    pools: dict[tuple[str, str], list[Share]] = {}
    for share in shares.values():
        pools.setdefault(share.pool, []).append(share)
    return pools
