"""Decides how many cells of a place should be on which instance type, from existing cells, free machines and prices.
Running cells stay where they are. Missing cells go to the type with the lowest price per request that has machines;
surplus ones stop on the most expensive type. One running cell at a time moves: to a type that a user set, or to one
that carries as much for at least a fifth less. Deployments with a single type need no decision."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.capacity.planning.pools import may_use
from fleet.faults.planning.announced import Notices
from fleet.placement.planning.packing import Spares
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, DeploymentView, FleetView
from fleet.reconcile.planning.states import CellState

ADVANTAGE = 0.2
"""Required saving before a running cell moves to another type. A start takes minutes of two cells and loses the cache,
and smaller changes of prices would move cells back and forth. Changes of roles require the same."""


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """An instance type for cells of a place. `capacity`: tested concurrency per cell; `price`: US dollars per hour and
    cell, None if unknown; `stated`: cells that a user set there, None for free placement; `having`: cells with all
    machines; `waiting`: cells without; `room`: further cells that machines exist for; `is_bought`: more can be bought;
    `is_short`: a cell has waited its full patience; `most`: cells that quotas allow, None for any number."""

    name: str
    capacity: float
    price: float | None = None
    stated: int | None = None
    having: int = 0
    waiting: int = 0
    room: int = 0
    is_bought: bool = False
    is_short: bool = False
    most: int | None = None

    @property
    def per_request(self) -> float | None:
        """US dollars per hour and concurrent request, or None if unknown."""
        return None if self.price is None or self.capacity <= 0 else self.price / self.capacity

    @property
    def supply(self) -> int | None:
        """Further cells that may get machines now, or None for any number."""
        return None if self.is_bought and not self.is_short else self.room


@dataclass(frozen=True, slots=True)
class TypeSplit:
    """`cells`: target per type; `why`: reasons of types that gain or lose a cell."""

    cells: Mapping[str, int]
    why: Mapping[str, str]


def cheapest_first(choices: Sequence[TypeChoice]) -> list[TypeChoice]:
    """By price per request, or as listed if one price is unknown."""
    costs = [one.per_request for one in choices]
    if any(cost is None for cost in costs):
        return list(choices)
    return sorted(choices, key=lambda one: one.per_request or 0.0)


def split_types(total: int, choices: Sequence[TypeChoice], *, may_move: bool = False) -> TypeSplit:
    """The division of a number of cells; fewer only if quotas allow no more. `may_move`: nothing else is in progress,
    so a running cell may move."""
    order = cheapest_first(choices)
    is_whole = sum(one.having for one in order) >= total
    coming = {one.name: _cells_coming(one, is_whole=is_whole) for one in order}
    cells = _kept_cells(total, order, coming)
    left, why = total - sum(cells.values()), dict[str, str]()
    if left:
        _add_missing(left, order, cells, coming, why)
    elif may_move and sum(one.having for one in choices) == total:
        _move_one(order, cells, why)
    return TypeSplit(cells, why)


def _cells_coming(one: TypeChoice, *, is_whole: bool) -> int:
    """Waiting cells that may get machines now, or whose type a user set."""
    if one.supply is None:
        return one.waiting
    wanted = max(0, (one.stated or 0) - one.having) if is_whole else 0
    return min(one.waiting, max(one.supply, wanted))


def _kept_cells(total: int, order: Sequence[TypeChoice], coming: Mapping[str, int]) -> dict[str, int]:
    """Running and starting cells without the surplus: first where a user wants them, then on the cheapest types. So a
    cell that another one replaces is surplus from the beginning; the ledger decides when it stops."""
    cells = dict.fromkeys((one.name for one in order), 0)
    left = total
    for is_stated in (True, False):
        for one in order:
            there = one.having + coming[one.name]
            most = there if one.most is None else min(there, one.most)
            most = min(most, one.stated or 0) if is_stated else most
            count = max(0, min(left, most - cells[one.name]))
            cells[one.name] += count
            left -= count
    return cells


def _add_missing(
    left: int, order: Sequence[TypeChoice], cells: dict[str, int], coming: Mapping[str, int], why: dict[str, str]
) -> None:
    """Missing cells: where a user wants them, then on types without a target, then anywhere without a target of 0.
    Cells without machines keep waiting where they are."""
    supply = {one.name: left if one.supply is None else max(0, one.supply - coming[one.name]) for one in order}
    for rank in range(3):
        for one in order:
            due = _cells_due(one, cells[one.name], left, rank)
            count = max(0, min(left, supply[one.name], due, _allowed(one, cells, left)))
            if count:
                cells[one.name] += count
                supply[one.name] -= count
                left -= count
                why[one.name] = _why_there(one, order, supply, rank)
    for one in sorted(order, key=lambda one: (one.stated == 0, not one.waiting)):
        count = min(left, _allowed(one, cells, left))
        if count:
            cells[one.name] += count
            left -= count
            why[one.name] = "no listed type has a free machine"


def _cells_due(one: TypeChoice, there: int, left: int, rank: int) -> int:
    if rank == 0:
        return (one.stated or 0) - there
    return 0 if one.stated == 0 or (rank == 1 and one.stated is not None) else left


def _allowed(one: TypeChoice, cells: Mapping[str, int], left: int) -> int:
    return left if one.most is None else max(0, one.most - cells[one.name])


def _why_there(one: TypeChoice, order: Sequence[TypeChoice], supply: Mapping[str, int], rank: int) -> str:
    if rank == 0:
        return f"{one.stated} of its cells have this type as their target"
    before = [other.name for other in order[: order.index(one)] if other.stated is None and not supply[other.name]]
    if before:
        return f"no free machine of {', '.join(before)}"
    if rank == 2 or any(other.per_request is None for other in order):
        return "the first that is listed and has machines"
    return f"{one.per_request:.3g} $/h per concurrent request, the lowest of the types with machines"


def _move_one(order: Sequence[TypeChoice], cells: dict[str, int], why: dict[str, str]) -> None:
    """Moves one cell to the type that a user wants, or to a cheaper type with available machines."""
    for gains, gives in [(gains, gives) for gains in order for gives in reversed(order) if gains is not gives]:
        if not cells[gives.name] or not _allowed(gains, cells, 1) or gains.supply == 0:
            continue
        if reason := _stated_move(gains, gives, cells) or _cheaper_move(gains, gives, cells):
            cells[gains.name] += 1
            cells[gives.name] -= 1
            why[gains.name] = why[gives.name] = reason
            return


def _stated_move(gains: TypeChoice, gives: TypeChoice, cells: Mapping[str, int]) -> str:
    if (gains.stated or 0) > cells[gains.name] and cells[gives.name] > (gives.stated or 0):
        return f"{gains.stated} of its cells have the target {gains.name}"
    if gives.stated is not None and gains.stated is None and cells[gives.name] > gives.stated:
        return f"{gives.stated} of its cells have the target {gives.name}"
    return ""


def _cheaper_move(gains: TypeChoice, gives: TypeChoice, cells: Mapping[str, int]) -> str:
    if gains.stated is not None or cells[gives.name] <= (gives.stated or 0) or not gains.room:
        return ""
    cost, before = gains.per_request, gives.per_request
    if cost is None or before is None or cost > (1 - ADVANTAGE) * before or gains.capacity < gives.capacity:
        return ""
    return (
        f"{gains.name} carries as much for {cost:.3g} $/h per concurrent request instead of {before:.3g} on "
        f"{gives.name}, and has machines"
    )


Place = tuple[str, str]
"""Deployment, region."""
SETTLED = frozenset({CellState.READY, CellState.FAILED})
"""If all cells are in these states, nothing is in progress. A cell that fails repeatedly blocks nothing."""


class TypePlan:
    """Types of one pass. `live`: cells that stay, by place."""

    def __init__(
        self, fleet: FleetView, live: Mapping[Place, list[CellView]], notices: Notices, settings: FleetSettings
    ) -> None:
        self._fleet, self._live, self._notices, self._settings = fleet, live, notices, settings
        self._splits: dict[Place, TypeSplit] = {}
        self._given: Counter[tuple[str, str]] = Counter()
        """Machines of pools promised to cells of this pass."""
        self._spares: Spares | None = None

    def has_choice(self, place: Place) -> bool:
        """Whether its cells may be on several types."""
        return bool(self._fleet.deployments[place[0]].further)

    def split(self, place: Place) -> TypeSplit:
        if place not in self._splits:
            self._splits[place] = self._split(place)
        return self._splits[place]

    def of_surge(self, place: Place, version: str) -> str:
        """Type of a surge cell of a rollout to this version: the one with the most cells left."""
        left = Counter(cell.instance_type for cell in self._live.get(place, ()) if cell.version != version)
        types = self._fleet.deployments[place[0]].instance_types
        return max(types, key=lambda kind: (left[kind], -types.index(kind)))

    def there(self, place: Place) -> Counter[str]:
        """Cells per type without those whose machines end."""
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
            room=max(0, self._free_machines(spec, region, kind)) // version.nodes_per_cell,
            is_bought=view.free is None,
            most=self._quota_cells(spec, region, kind, version.nodes_per_cell),
            is_short=any(self._has_waited(cell, is_bought=view.free is None) for cell in waiting),
        )

    def _quota_cells(self, spec: DeploymentView, region: str, kind: str, size: int) -> int | None:
        """Cells that its team's quotas leave it there. Borrowing is reserved for deployments without a choice."""
        left = [
            quota.machines - self._used_elsewhere(spec, region, kind, quota.region)
            for quota in self._fleet.quotas
            if (quota.team, quota.instance_type) == (spec.team, kind) and quota.region in {"", region}
        ]
        return max(0, min(left) // size) if left else None

    def _used_elsewhere(self, spec: DeploymentView, region: str, kind: str, where: str) -> int:
        """Machines of a type in other cells of the same team, in a region or in total."""
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
        """Whether a cell has waited long enough for others to make room, so machines are scarce."""
        boot_s = self._fleet.regions[cell.region].limits.boot_s if is_bought else 0.0
        waited_s = self._fleet.listening_for_s(cell.state_since, self._notices.now)
        return waited_s >= self._settings.shares.patience_s + boot_s

    def _free_machines(self, spec: DeploymentView, region: str, kind: str) -> int:
        """Machines for new cells: idle ones not reserved for repairs, and free ones of the region's pool."""
        self._spares = self._spares or Spares(self._fleet)
        view, pool = self._fleet.regions[region], (region, kind)
        unkept = self._spares.count(pool) - view.repair_only.get(kind, 0)
        idle = min(unkept, sum(may_use(spec.markets, node.markets) for node in self._spares.of(pool)))
        return idle + (view.free or {}).get(kind, 0) - self._given[pool]
