"""On which instance types the cells of a place should be, from what the fleet is. Pure; it counts what it has given out
in this pass. Deployments that list one type have nothing to be decided.
"""

from collections import Counter
from collections.abc import Mapping

from fleet.planning.markets import may_use
from fleet.planning.notices import Notices
from fleet.planning.placement.spares import Spares
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import CellView, DeploymentView, FleetView
from fleet.planning.states import CellState
from fleet.planning.type_split import TypeChoice, TypeSplit, split_types

Place = tuple[str, str]
"""Deployment, region."""
SETTLED = frozenset({CellState.READY, CellState.FAILED})
"""Where all cells are in one of these, nothing is under way. One that fails again and again keeps none of them."""


class TypePlan:
    """The types of one pass. `live`: the cells that stay, by place."""

    def __init__(
        self, fleet: FleetView, live: Mapping[Place, list[CellView]], notices: Notices, settings: FleetSettings
    ) -> None:
        self._fleet, self._live, self._notices, self._settings = fleet, live, notices, settings
        self._splits: dict[Place, TypeSplit] = {}
        self._given: Counter[tuple[str, str]] = Counter()
        """Machines of pools that cells of this pass were promised."""
        self._spares: Spares | None = None

    def has_choice(self, place: Place) -> bool:
        """Whether its cells may be on one type or another."""
        return bool(self._fleet.deployments[place[0]].further)

    def split(self, place: Place) -> TypeSplit:
        """How the cells that it should have should be divided."""
        if place not in self._splits:
            self._splits[place] = self._split(place)
        return self._splits[place]

    def of_surge(self, place: Place, version: str) -> str:
        """The type of a cell that a rollout to this version brings before another goes: that of which most are left."""
        left = Counter(cell.instance_type for cell in self._live.get(place, ()) if cell.version != version)
        types = self._fleet.deployments[place[0]].instance_types
        return max(types, key=lambda kind: (left[kind], -types.index(kind)))

    def there(self, place: Place) -> Counter[str]:
        """Cells of each type, but for those whose machines end."""
        return Counter(cell.instance_type for cell in self._staying(place))

    def _staying(self, place: Place) -> list[CellView]:
        return [cell for cell in self._live.get(place, ()) if cell.id not in self._notices.going]

    def _split(self, place: Place) -> TypeSplit:
        spec, region = self._fleet.deployments[place[0]], place[1]
        staying, wanted = self._staying(place), spec.cells_wanted.get(region, 0)
        choices = [self._choice(spec, region, kind, staying) for kind in spec.instance_types]
        is_settled = len(staying) == len(self._live.get(place, ())) and all(cell.state in SETTLED for cell in staying)
        split = split_types(wanted, choices, may_move=is_settled and spec.name not in self._fleet.rollouts)
        for one in choices:
            more = max(0, split.cells[one.name] - one.having)
            self._given[region, one.name] += more * spec.of(spec.version, one.name).nodes_per_cell
        return split

    def _choice(self, spec: DeploymentView, region: str, kind: str, staying: list[CellView]) -> TypeChoice:
        view, version = self._fleet.regions[region], spec.of(spec.version, kind)
        here = [cell for cell in staying if cell.instance_type == kind]
        waiting = [cell for cell in here if self._fleet.machines_lacking(cell)]
        machine = view.prices.get(kind)
        return TypeChoice(
            name=kind,
            capacity=float(version.concurrency),
            price=None if machine is None else machine * version.nodes_per_cell,
            stated=spec.claim(region).by_type.get(kind),
            having=len(here) - len(waiting),
            waiting=len(waiting),
            room=max(0, self._free(spec, region, kind)) // version.nodes_per_cell,
            is_bought=view.free is None,
            most=self._most(spec, region, kind, version.nodes_per_cell),
            is_short=any(self._has_waited(cell, is_bought=view.free is None) for cell in waiting),
        )

    def _most(self, spec: DeploymentView, region: str, kind: str, size: int) -> int | None:
        """Cells that the quotas of its team leave it there; what others could lend is for those who have no choice."""
        left = [
            quota.machines - self._used_elsewhere(spec, region, kind, quota.region)
            for quota in self._fleet.quotas
            if (quota.team, quota.instance_type) == (spec.team, kind) and quota.region in {"", region}
        ]
        return max(0, min(left) // size) if left else None

    def _used_elsewhere(self, spec: DeploymentView, region: str, kind: str, where: str) -> int:
        """Machines of a type in cells of the same team but for those of this place, in a region or over all."""
        others = (
            cell
            for cell in self._fleet.cells.values()
            if cell.instance_type == kind
            and where in {"", cell.region}
            and (cell.deployment, cell.region) != (spec.name, region)
            and self._fleet.deployments[cell.deployment].team == spec.team
        )
        return sum(len(cell.members) for cell in others)

    def _has_waited(self, cell: CellView, *, is_bought: bool) -> bool:
        """As long as others would make room for it: then its machines are short."""
        boot_s = self._fleet.regions[cell.region].limits.boot_s if is_bought else 0.0
        waited_s = self._fleet.listening_for_s(cell.state_since, self._notices.now)
        return waited_s >= self._settings.shares.patience_s + boot_s

    def _free(self, spec: DeploymentView, region: str, kind: str) -> int:
        """Machines that new cells may have: idle ones that are not kept for repairs, and free ones of its own pool."""
        self._spares = self._spares or Spares(self._fleet)
        view, pool = self._fleet.regions[region], (region, kind)
        unkept = self._spares.count(pool) - view.repair_only.get(kind, 0)
        idle = min(unkept, sum(may_use(spec.markets, node.markets) for node in self._spares.of(pool)))
        return idle + (view.free or {}).get(kind, 0) - self._given[pool]
