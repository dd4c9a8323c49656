"""The order in which cells get machines while they are scarce, and the cells that quotas of teams allow. Quotas,
placement and preemption all use this order. Decides nothing else.

First come cells that may not be taken: those below a minimum that is not preemptible. Then all others. Each by
priority; of one priority first those below a minimum, then so that each deployment gets the same share of its target.
Teams with a quota of a type share the sum of these quotas. Each gets its own first; others borrow what a team leaves
idle, in turn. A team without a quota of a type is neither limited nor counted. Quotas of a region are filled first,
each region separately; those over all regions then divide what these leave, so neither is exceeded."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from fleet.capacity.planning.pools import Markets
from fleet.deployments.planner import PRIORITY_MOST, ClaimView, QuotaView, SharingPolicy
from fleet.reconcile.planning.snapshot import CellView, DeploymentView, FleetView

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
    """A deployment in a region. `size`: machines per cell; `holding`: cells with their machines, without leaving ones;
    `lacking`: waiting cells, those that lack least first; `vacating`: machines of leaving cells."""

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
        """Cells that stay if nothing is taken: those with machines, up to the target."""
        return min(self.claim.in_force, self.holding)

    @property
    def surplus(self) -> int:
        """Cells with machines above the target."""
        return self.holding - self.kept

    def turn(self, number: int) -> Turn:
        """When the cell of this number, from 0, gets its machines; lower is sooner."""
        fraction = (number + 1) / max(1, self.claim.asked)
        return *turn_of(self.policy, number, self.floor), number >= self.floor, fraction, self.deployment, self.region


def turn_of(policy: SharingPolicy, number: int, floor: int) -> tuple[int, int]:
    """Whether a cell may be taken, and how far its priority is from the highest."""
    return int(number >= floor or bool(policy.preemptible)), PRIORITY_MOST - (policy.priority or 0)


def cells_in_turn(fleet: FleetView, waiting: Collection[str]) -> dict[str, Turn]:
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
    """Every place of a deployment with valid data and a single instance type. Deployments with a choice move to another
    type instead of taking machines, and give none."""
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
    """Places that want machines of the same region and type."""
    pools: dict[tuple[str, str], list[Share]] = {}
    for share in shares.values():
        pools.setdefault(share.pool, []).append(share)
    return pools


OVERALL = ""
"""Used instead of a region: over all of them."""


@dataclass(frozen=True, slots=True)
class QuotaLimit:
    """Cells that a place may have, the last `borrowed` of them on idle machines of other teams, and why no more. `own`:
    cells within its own quotas."""

    cells: int
    borrowed: int
    reason: str
    own: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TeamUse:
    """Machines of a team and type, in a region or in total: entitled, wanted and allowed now, of which some are
    borrowed."""

    team: str
    instance_type: str
    entitled: int
    wanted: int
    allowed: int
    region: str = OVERALL

    @property
    def borrowed(self) -> int:
        return max(0, self.allowed - self.entitled)


@dataclass(frozen=True, slots=True)
class QuotaPlan:
    """`limits`: places that are limited or borrow; `uses`: of every quota."""

    limits: Mapping[Place, QuotaLimit]
    uses: tuple[TeamUse, ...]


Held = Mapping[tuple[str, str, str], int]
"""(team, instance type, region) -> machines in cells that might be on another type; no limit applies to them."""


def machines_held(fleet: FleetView) -> Counter[tuple[str, str, str]]:
    """By teams, for deployments with several types."""
    held: Counter[tuple[str, str, str]] = Counter()
    for cell in fleet.cells.values():
        spec = fleet.deployments[cell.deployment]
        if spec.further and spec.team:
            held[spec.team, cell.instance_type, cell.region] += len(cell.members)
    return held


def plan_quotas(shares: Iterable[Share], quotas: Iterable[QuotaView], held: Held = MappingProxyType({})) -> QuotaPlan:
    limits: dict[Place, QuotaLimit] = {}
    uses: list[TeamUse] = []
    there = {share.place: share for share in shares}
    by_scope: dict[tuple[str, str], dict[str, QuotaView]] = {}
    for quota in quotas:
        by_scope.setdefault((quota.region, quota.instance_type), {})[quota.team] = quota
    for (region, kind), rows in sorted(by_scope.items(), key=lambda one: (one[0][0] == OVERALL, one[0])):
        wanting = [
            share
            for share in there.values()
            if share.instance_type == kind and share.team in rows and region in {OVERALL, share.region}
        ]
        taken = {
            team: sum(
                count
                for (who, what, where), count in held.items()
                if (who, what) == (team, kind) and region in {OVERALL, where}
            )
            for team in rows
        }
        allotment = _Allotment(rows, wanting, region, taken)
        allotment.fill()
        for place, limit in allotment.limits().items():
            limits[place] = _stricter_limit(limits.get(place), limit)
            there[place] = _capped(there[place], limit.cells)
        uses += allotment.uses(kind)
    return QuotaPlan(limits, tuple(uses))


def _stricter_limit(first: QuotaLimit | None, then: QuotaLimit) -> QuotaLimit:
    """The stricter of the limits by region and in total, with its reason."""
    if first is None:
        return then
    reason = then.reason if then.cells < first.cells else first.reason
    return QuotaLimit(then.cells, max(first.borrowed, then.borrowed), reason, {**first.own, **then.own})


def _capped(share: Share, cells: int) -> Share:
    return replace(share, claim=replace(share.claim, asked=min(share.claim.asked, cells)))


class _Allotment:
    """Assigns the machines of one type to cells of teams with a quota of it, in a region or in total."""

    def __init__(
        self, quotas: Mapping[str, QuotaView], shares: list[Share], region: str, taken: Mapping[str, int]
    ) -> None:
        self.quotas = quotas
        self.shares = shares
        self.region = region
        self.wanted: Counter[str] = Counter(taken)
        for share in shares:
            self.wanted[share.team] += share.claim.asked * share.size
        self.total = sum(quota.machines for quota in quotas.values())
        self.used: Counter[str] = Counter(taken)
        self.given: Counter[Place] = Counter()
        self.borrowed: Counter[Place] = Counter()
        self.bounded: dict[Place, str] = {}
        """Places that may not borrow as much as they want, and their limit."""

    def fill(self) -> None:
        """Own machines first, then those that others leave."""
        if all(self.wanted[team] <= quota.machines for team, quota in self.quotas.items()):
            self.used = self.wanted
            self.given.update({share.place: share.claim.asked for share in self.shares})
            return
        beyond: list[tuple[Share, int]] = []
        full: set[Place] = set()
        for share, number in self._cells():
            if share.place in full or self.used[share.team] + share.size > self.quotas[share.team].machines:
                full.add(share.place)
                beyond.append((share, number))
            else:
                self._grant_share(share)
        # A place that borrows already precedes an equal one, so that cells do not move between them.
        beyond.sort(key=lambda one: _borrows_at(*one))
        for share, _ in beyond:
            bound = self._bound(share)
            if share.place in self.bounded or bound:
                self.bounded.setdefault(share.place, bound)
            else:
                self._grant_share(share)
                self.borrowed[share.place] += 1

    def _cells(self) -> list[tuple[Share, int]]:
        cells = [(share, number) for share in self.shares for number in range(share.claim.asked)]
        return sorted(cells, key=lambda one: one[0].turn(one[1]))

    def _grant_share(self, share: Share) -> None:
        self.used[share.team] += share.size
        self.given[share.place] += 1

    def _bound(self, share: Share) -> str:
        quota = self.quotas[share.team]
        more = max(0, self.used[share.team] + share.size - quota.machines)
        if quota.borrow_most is not None and more > quota.borrow_most:
            return f"it may borrow at most {quota.borrow_most}"
        if self.used.total() + share.size > self.total:
            others = [team for team in sorted(self.quotas) if team != share.team]
            have = ", ".join(f"{team} has {self.used[team]} of {self.quotas[team].machines}" for team in others)
            return f"nothing more can be borrowed: {have or 'no other team has a quota of it'}"
        return ""

    def limits(self) -> dict[Place, QuotaLimit]:
        return {
            share.place: QuotaLimit(
                self.given[share.place],
                self.borrowed[share.place],
                self._reason(share),
                {self.region: self.given[share.place] - self.borrowed[share.place]},
            )
            for share in self.shares
            if self.given[share.place] < share.claim.asked or self.borrowed[share.place]
        }

    def _reason(self, share: Share) -> str:
        quota, used = self.quotas[share.team], self.used[share.team]
        text = f"team {share.team} has {min(used, quota.machines)} of {quota.machines} {share.instance_type}"
        text += f" in {self.region}" if self.region else ""
        if used > quota.machines:
            text += f" and borrows {used - quota.machines}"
        return f"{text}; {self.bounded[share.place]}" if share.place in self.bounded else text

    def uses(self, kind: str) -> list[TeamUse]:
        return [
            TeamUse(team, kind, quota.machines, self.wanted[team], self.used[team], self.region)
            for team, quota in sorted(self.quotas.items())
        ]


def _borrows_at(share: Share, number: int) -> tuple[object, ...]:
    stage, rank, is_surplus, *others = share.turn(number)
    return stage, rank, is_surplus, number >= share.claim.in_force, *others
