"""How many cells of each place the quotas of teams allow, and who borrows what. Pure.

Teams with a quota of an instance type have, all together, as many machines as these quotas come to. Each first has its
own; what a team does not want the others may borrow, in the order of turns, until it does. Who has no quota of a type
is neither bound by these nor counted in them.

Quotas of a region divide what its teams have there, by themselves, and come first; those over all regions then divide
what the regions leave each place. So neither is ever exceeded.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from fleet.planning.claims import QuotaView
from fleet.planning.shares.turns import Place, Share
from fleet.planning.snapshot import FleetView

OVERALL = ""
"""In place of a region: over all of them."""


@dataclass(frozen=True, slots=True)
class QuotaLimit:
    """Cells that a place may have, the last `borrowed` of them on what others leave idle, and why no more. `own`: cells
    that it has on its own by the quotas of its region and by those over all, where such bind or lend to it."""

    cells: int
    borrowed: int
    reason: str
    own: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TeamUse:
    """What a team comes to of a type, in a region or over all: machines that it is entitled to, would want and may have
    now, of which it borrows some."""

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
    """`limits` of the places that may have less than was set or borrow some of it; `uses` of every quota."""

    limits: Mapping[Place, QuotaLimit]
    uses: tuple[TeamUse, ...]


Held = Mapping[tuple[str, str, str], int]
"""Team, instance type, region -> machines of it in cells that might be on another type; no limit here binds them."""


def machines_held(fleet: FleetView) -> Counter[tuple[str, str, str]]:
    """By teams, where a deployment lists several types."""
    held: Counter[tuple[str, str, str]] = Counter()
    for cell in fleet.cells.values():
        spec = fleet.deployments[cell.deployment]
        if spec.further and spec.team:
            held[spec.team, cell.instance_type, cell.region] += len(cell.members)
    return held


def plan_quotas(shares: Iterable[Share], quotas: Iterable[QuotaView], held: Held = MappingProxyType({})) -> QuotaPlan:
    """What the quotas of all types allow."""
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
            limits[place] = _both(limits.get(place), limit)
            there[place] = _capped(there[place], limit.cells)
        uses += allotment.uses(kind)
    return QuotaPlan(limits, tuple(uses))


def _both(first: QuotaLimit | None, then: QuotaLimit) -> QuotaLimit:
    """The limit by the quotas of a region and by those over all; the one that allows less says why."""
    if first is None:
        return then
    reason = then.reason if then.cells < first.cells else first.reason
    return QuotaLimit(then.cells, max(first.borrowed, then.borrowed), reason, {**first.own, **then.own})


def _capped(share: Share, cells: int) -> Share:
    return replace(share, claim=replace(share.claim, asked=min(share.claim.asked, cells)))


class _Allotment:
    """The machines of one type on their way to the cells of the teams that have a quota of it, in a region or over
    all."""

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
        """Places that may not borrow as much as they want, and what bounds them."""

    def fill(self) -> None:
        """Own machines first, then those that are left of others."""
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
                self._give(share)
        # Who borrows already goes before an equal, so that cells do not move between them.
        beyond.sort(key=lambda one: _borrows_at(*one))
        for share, _ in beyond:
            bound = self._bound(share)
            if share.place in self.bounded or bound:
                self.bounded.setdefault(share.place, bound)
            else:
                self._give(share)
                self.borrowed[share.place] += 1

    def _cells(self) -> list[tuple[Share, int]]:
        cells = [(share, number) for share in self.shares for number in range(share.claim.asked)]
        return sorted(cells, key=lambda one: one[0].turn(one[1]))

    def _give(self, share: Share) -> None:
        self.used[share.team] += share.size
        self.given[share.place] += 1

    def _bound(self, share: Share) -> str:
        quota = self.quotas[share.team]
        more = max(0, self.used[share.team] + share.size - quota.machines)
        if quota.borrow_most is not None and more > quota.borrow_most:
            return f"it may borrow {quota.borrow_most} at most"
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
