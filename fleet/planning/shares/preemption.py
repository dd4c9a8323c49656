"""Which cells make room for those that wait for machines and go before them. Pure.

Who may take: a cell that has waited for its patience and is of those that its deployment may take machines for. From
whom: a deployment of lower priority in the same region and instance type, above its floor, and below it only if it is
preemptible; or a team that borrows what the taker's team is entitled to. What is borrowed goes first, then what is
above floors, then what is preemptible; each from the lowest priority up, and from who has most of what was set. No cell
is taken unless enough can be taken for the one that waits, and of no deployment more at once than its update policy
lets be unavailable.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from fleet.planning.claims import GrantRule, Preempts
from fleet.planning.decisions import GrantCells
from fleet.planning.markets import may_use
from fleet.planning.placement.spares import is_idle
from fleet.planning.settings import FleetSettings
from fleet.planning.shares.quotas import QuotaPlan
from fleet.planning.shares.turns import Lack, Place, Share, Turn, by_pool
from fleet.planning.snapshot import FleetView
from fleet.planning.states import NodeState

Pool = tuple[str, str]
"""Region, instance type."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A cell that needs `machines` more, or one that is still to be created (`lack` None). `may_take`: others may have
    to make room for it, once it has waited long enough."""

    share: Share
    turn: Turn
    machines: int
    lack: Lack | None
    may_take: bool


@dataclass
class PoolState:
    """The machines of a pool that will be free without anything being decided, and who waits for some, in turn."""

    pool: Pool
    is_bought: bool
    free: int
    waiting: list[Waiting]
    shares: list[Share]

    @property
    def uncommitted(self) -> int:
        """Free machines that nobody waits for."""
        return self.free - sum(one.machines for one in self.waiting)


@dataclass(frozen=True, slots=True)
class _Victim:
    """Of its `left` cells `cells` may be taken at this stage, `pace` of them now, and `most` in the end. The least key
    goes first, and no stage begins before the one before it is over."""

    share: Share
    left: int
    cells: int
    most: int
    pace: int
    stage: int

    @property
    def key(self) -> tuple[int, int, float, Place]:
        return self.stage, self.share.priority, -self.left / max(1, self.share.claim.asked), self.share.place


BORROWED, SURPLUS, BELOW_FLOOR = range(3)


@dataclass
class Preemption:
    """`grants`: what this pass takes, by place."""

    fleet: FleetView
    settings: FleetSettings
    now: datetime
    quotas: QuotaPlan
    grants: dict[Place, GrantCells] = field(default_factory=dict)

    def plan(self, state: PoolState) -> None:
        """Make room for who waits, in turn. A cell that waits and may take nothing keeps what is free all the same."""
        free = max(0, state.free)
        for one in state.waiting:
            short, free = max(0, one.machines - free), max(0, free - one.machines)
            if short and one.may_take and self._has_waited(state, one):
                self._take(state, one, short)

    def _has_waited(self, state: PoolState, one: Waiting) -> bool:
        if one.lack is None:
            return False
        boot_s = self.fleet.regions[state.pool[0]].limits.boot_s if state.is_bought else 0.0
        waited_s = self.fleet.listening_for_s(one.lack.cell.state_since, self.now)
        return waited_s >= self.settings.shares.patience_s + boot_s

    def _take(self, state: PoolState, one: Waiting, short: int) -> None:
        found = (self._victim(one.share, share) for share in state.shares)
        victims = sorted((victim for victim in found if victim is not None), key=lambda victim: victim.key)
        if sum(victim.most * victim.share.size for victim in victims) < short:
            return
        stage = BELOW_FLOOR
        for victim in victims:
            if short <= 0 or victim.stage > stage:
                return
            needed = -(-short // victim.share.size)
            if victim.pace < min(victim.cells, needed):
                stage = victim.stage  # there will be more of it later
            if cells := max(0, min(victim.cells, victim.pace, needed)):
                short -= cells * victim.share.size
                self.grants[victim.share.place] = _taking(one.share, victim, cells)

    def _victim(self, taker: Share, share: Share) -> _Victim | None:
        """What may be taken of a place for this one, after what was taken of it already."""
        if share.deployment == taker.deployment or not self._is_usable(taker, share):
            return None
        before = self.grants.get(share.place)
        left = share.kept if before is None or before.granted is None else before.granted
        borrowed = self._borrowed(taker, share, left)
        is_lower = share.priority < taker.priority
        surplus = max(0, left - share.floor) if is_lower else 0
        most = left if is_lower and share.policy.preemptible else max(borrowed, surplus)
        if most <= 0:
            return None
        pace = max(1, share.max_unavailable) - share.surplus - -(-share.vacating // share.size) - (share.kept - left)
        if borrowed:
            return _Victim(share, left, borrowed, most, pace, BORROWED)
        return _Victim(share, left, surplus or most, most, pace, SURPLUS if surplus else BELOW_FLOOR)

    def _is_usable(self, taker: Share, share: Share) -> bool:
        """Whether the machines of its cells are such as the taker may use."""
        if not taker.markets:
            return True
        cells = (cell for cell in self.fleet.cells.values() if (cell.deployment, cell.region) == share.place)
        members = (self.fleet.nodes[member.node] for cell in cells for member in cell.members)
        return all(may_use(taker.markets, node.markets) for node in members)

    def _borrowed(self, taker: Share, share: Share, left: int) -> int:
        """How many of so many cells are on machines that the taker's team is entitled to: by the quotas of the region,
        or by those over all."""
        limit = self.quotas.limits.get(share.place)
        if limit is None or share.team == taker.team:
            return 0
        return max((max(0, left - own) for scope, own in limit.own.items() if self._owns(taker, scope)), default=0)

    def _owns(self, taker: Share, scope: str) -> bool:
        """Whether the taker's team wants no more there than it is entitled to."""
        used = {(use.team, use.instance_type, use.region): use for use in self.quotas.uses}
        use = used.get((taker.team, taker.instance_type, scope))
        return use is not None and use.allowed <= use.entitled


def _taking(taker: Share, victim: _Victim, cells: int) -> GrantCells:
    share, is_borrowed = victim.share, victim.stage == BORROWED
    what = "are on borrowed machines" if is_borrowed else f"have priority {share.priority}"
    reason = (
        f"{taker.deployment}, priority {taker.priority}, has machines for {taker.holding} of {taker.claim.in_force} "
        f"cells in {share.region} and no {share.instance_type} is free: {cells} of {victim.left} cells, which {what}, "
        "make room"
    )
    return GrantCells(
        deployment=share.deployment,
        region=share.region,
        asked=share.claim.asked,
        seen=share.claim.granted,
        granted=victim.left - cells,
        rule=GrantRule.RECLAIM if is_borrowed else GrantRule.PRIORITY,
        reason=reason,
        taker=taker.deployment,
    )


def pool_states(
    fleet: FleetView, shares: Mapping[Place, Share], settings: FleetSettings, now: datetime
) -> list[PoolState]:
    """Every pool that somebody wants machines of."""
    free = _free_machines(fleet, settings, now)
    return [
        PoolState(
            pool=pool,
            is_bought=fleet.regions[pool[0]].free is None,
            free=free.get(pool, 0) + sum(share.vacating + share.surplus * share.size for share in there),
            waiting=sorted((one for share in there for one in _waiting(share)), key=lambda one: one.turn),
            shares=there,
        )
        for pool, there in sorted(by_pool(shares).items())
        if pool[0] in fleet.regions
    ]


def _waiting(share: Share) -> Iterator[Waiting]:
    """Cells that should be there and have no machines, those that nearly have them first, whether they exist or not."""
    entitled = {Preempts.MIN: share.floor, Preempts.NEED: share.claim.in_force, Preempts.NOTHING: 0}
    for place in range(max(0, share.claim.in_force - share.holding)):
        number = share.holding + place
        lack = share.lacking[place] if place < len(share.lacking) else None
        machines = lack.machines if lack else share.size
        yield Waiting(share, share.turn(number), machines, lack, number < entitled[share.policy.preempts])


def _free_machines(fleet: FleetView, settings: FleetSettings, now: datetime) -> dict[Pool, int]:
    """Spares that new cells may have, machines of regions' own pools, and those that will be there soon."""
    free: dict[Pool, int] = {}
    for region in fleet.regions.values():
        for kind, kept in region.repair_only.items():
            free[region.name, kind] = -kept
        for kind, count in (region.free or {}).items():
            free[region.name, kind] = free.get((region.name, kind), 0) + count
    members = {member.node for cell in fleet.cells.values() for member in cell.members}
    for node in fleet.nodes.values():
        pool = (node.region, node.instance_type)
        boot_s = fleet.regions[node.region].limits.boot_s if node.region in fleet.regions else 0.0
        patience_s = settings.shares.patience_s + boot_s
        is_coming = node.state is NodeState.JOINING and (now - node.state_since).total_seconds() < patience_s
        is_there = node.state in {NodeState.READY, NodeState.SUSPECT} and not node.cordoned
        if node.id not in members and (is_coming or is_idle(node) or (is_there and node.report.cell)):
            free[pool] = free.get(pool, 0) + 1
    return free
