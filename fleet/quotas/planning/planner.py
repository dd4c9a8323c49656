"""Decides how many of their target cells deployments get while machines are scarce. It limits and gives back; the
reconciler starts and drains cells under the disruption ledger. What was taken stays taken for `ShareSettings.kept_s`,
and is then given back only if no deployment with precedence waits.

Who may take: a cell that has waited its patience and for which its deployment may take machines. From whom: a
deployment of lower priority in the same region and on the same type, above its minimum, or below it if it is
preemptible; or a team that borrows machines to which the taker's team is entitled. Borrowed cells go first, then those
above minimums, then preemptible ones, each from the lowest priority and the largest share of the target. Nothing is
taken unless it suffices for the waiting cell, and never more at a time than the update policy's `max_unavailable`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from fleet.capacity.planning.pools import may_use
from fleet.deployments.planner import GrantRule, Preempts
from fleet.placement.planning.packing import is_idle
from fleet.quotas.planning.turns import (
    Lack,
    Place,
    QuotaLimit,
    QuotaPlan,
    Share,
    Turn,
    by_pool,
    machines_held,
    plan_quotas,
    shares_of,
)
from fleet.reconcile.planning.decisions import Decision, GrantCells
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import WITHOUT_MACHINES, FleetView
from fleet.reconcile.planning.states import NodeState

Pool = tuple[str, str]
"""Region, instance type."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A cell that needs `machines` more, or, with `lack` None, does not exist yet. `may_take`: it has waited long
    enough for others to make room."""

    share: Share
    turn: Turn
    machines: int
    lack: Lack | None
    may_take: bool


@dataclass
class PoolState:
    """A pool's machines that will be free anyway, and who waits for some, in turn."""

    pool: Pool
    is_bought: bool
    free: int
    waiting: list[Waiting]
    shares: list[Share]

    @property
    def uncommitted(self) -> int:
        """Free machines that no cell waits for."""
        return self.free - sum(one.machines for one in self.waiting)


@dataclass(frozen=True, slots=True)
class _VictimPlace:
    """At this stage `cells` of its `left` cells may be taken, `pace` of them now, and `most` in total. The lowest key
    goes first; a stage begins when the previous one is exhausted."""

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
        """Makes room for waiting cells, in turn. A cell that may not take anything still keeps free machines."""
        free = max(0, state.free)
        for one in state.waiting:
            short, free = max(0, one.machines - free), max(0, free - one.machines)
            if short and one.may_take and self._has_waited(state, one):
                self._preempt_for(state, one, short)

    def _has_waited(self, state: PoolState, one: Waiting) -> bool:
        if one.lack is None:
            return False
        boot_s = self.fleet.regions[state.pool[0]].limits.boot_s if state.is_bought else 0.0
        waited_s = self.fleet.listening_for_s(one.lack.cell.state_since, self.now)
        return waited_s >= self.settings.shares.patience_s + boot_s

    def _preempt_for(self, state: PoolState, one: Waiting, short: int) -> None:
        found = (self._victim_place(one.share, share) for share in state.shares)
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

    def _victim_place(self, taker: Share, share: Share) -> _VictimPlace | None:
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
            return _VictimPlace(share, left, borrowed, most, pace, BORROWED)
        return _VictimPlace(share, left, surplus or most, most, pace, SURPLUS if surplus else BELOW_FLOOR)

    def _is_usable(self, taker: Share, share: Share) -> bool:
        if not taker.markets:
            return True
        cells = (cell for cell in self.fleet.cells.values() if (cell.deployment, cell.region) == share.place)
        members = (self.fleet.nodes[member.node] for cell in cells for member in cell.members)
        return all(may_use(taker.markets, node.markets) for node in members)

    def _borrowed(self, taker: Share, share: Share, left: int) -> int:
        """Number of these cells on machines to which the taker's team is entitled, by the quotas of the region or in
        total."""
        limit = self.quotas.limits.get(share.place)
        if limit is None or share.team == taker.team:
            return 0
        return max(
            (max(0, left - own) for scope, own in limit.own.items() if self._is_within_quota(taker, scope)), default=0
        )

    def _is_within_quota(self, taker: Share, scope: str) -> bool:
        used = {(use.team, use.instance_type, use.region): use for use in self.quotas.uses}
        use = used.get((taker.team, taker.instance_type, scope))
        return use is not None and use.allowed <= use.entitled


def _taking(taker: Share, victim: _VictimPlace, cells: int) -> GrantCells:
    share, is_borrowed = victim.share, victim.stage == BORROWED
    what = "are on borrowed machines" if is_borrowed else f"have priority {share.priority}"
    reason = (
        f"{taker.deployment}, priority {taker.priority}, has machines for {taker.holding} of {taker.claim.in_force} "
        f"cells in {share.region}, and no {share.instance_type} is free: {cells} of {victim.left} cells, which {what}, "
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
    """Target cells without machines, existing or not; those that lack least first."""
    entitled = {Preempts.MIN: share.floor, Preempts.NEED: share.claim.in_force, Preempts.NOTHING: 0}
    for place in range(max(0, share.claim.in_force - share.holding)):
        number = share.holding + place
        lack = share.lacking[place] if place < len(share.lacking) else None
        machines = lack.machines if lack else share.size
        yield Waiting(share, share.turn(number), machines, lack, number < entitled[share.policy.preempts])


def _free_machines(fleet: FleetView, settings: FleetSettings, now: datetime) -> dict[Pool, int]:
    """Spares for new cells, machines of regions' own pools, and those that will be free soon."""
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


TAKEN = frozenset({GrantRule.RECLAIM, GrantRule.PRIORITY})
"""Rules by which cells were taken."""


def plan_shares(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Changes of grants: limits by quota, room for others, and returns."""
    if not _has_work(fleet):
        return ()
    shares = shares_of(fleet)
    quotas = plan_quotas(shares.values(), fleet.quotas, machines_held(fleet))
    bounded = [
        one for share in shares.values() if (one := _limits_by_quota(share, quotas.limits.get(share.place))) is not None
    ]
    if bounded:
        return tuple(bounded)  # what others may take depends on this
    states = pool_states(fleet, shares, settings, now)
    preemption = Preemption(fleet, settings, now, quotas)
    for state in states:
        preemption.plan(state)
    if preemption.grants:
        return tuple(preemption.grants.values())
    return tuple(one for state in states for one in _returns(state, quotas.limits, settings.shares.kept_s, now))


def _has_work(fleet: FleetView) -> bool:
    """Without quotas, waiting cells and grants there is nothing to decide."""
    is_limited = any(claim.granted is not None for spec in fleet.deployments.values() for claim in spec.claims.values())
    return bool(fleet.quotas) or is_limited or any(cell.state in WITHOUT_MACHINES for cell in fleet.cells.values())


def _limits_by_quota(share: Share, limit: QuotaLimit | None) -> GrantCells | None:
    """Fewer cells, because the team's quota allows no more."""
    if limit is None or limit.cells >= share.claim.in_force:
        return None
    rule = GrantRule.RECLAIM if share.kept > limit.cells else GrantRule.QUOTA
    return _grant(share, limit.cells, rule, limit.reason)


def _returns(
    state: PoolState, limits: Mapping[Place, QuotaLimit], kept_s: float, now: datetime
) -> Iterator[GrantCells]:
    """Returns withheld cells, in turn and up to the quota. Cells taken for others return only if free machines that no
    cell waits for exist; where machines are bought, that is unknown and all return."""
    room = math.inf if state.is_bought else max(0, state.uncommitted)
    withheld = [(share, share.claim.granted) for share in state.shares if share.claim.granted is not None]
    for share, granted in sorted(withheld, key=lambda one: one[0].turn(one[1])):
        claim, limit = share.claim, limits.get(share.place)
        is_kept = claim.rule in TAKEN and claim.granted_at and now - claim.granted_at < timedelta(seconds=kept_s)
        if is_kept:
            continue
        most = min(claim.asked, limit.cells if limit else claim.asked)
        if claim.rule in {GrantRule.PRIORITY, GrantRule.RETURN} and granted < most:
            turn = share.turn(granted)
            is_behind = any(one.turn < turn for one in state.waiting if one.share.place != share.place)
            most = granted if is_behind else int(min(most, granted + room // share.size))
        if most >= claim.asked:
            yield _grant(share, None, GrantRule.RETURN, "nothing is withheld from it any more")
        elif limit is not None and most == limit.cells and (most, limit.reason) != (granted, claim.reason):
            yield _grant(share, most, GrantRule.QUOTA, limit.reason)
        elif most > granted:
            yield _grant(share, most, GrantRule.RETURN, f"machines for {most} of {claim.asked} cells are free again")
        room -= max(0, most - granted) * share.size


def _grant(share: Share, granted: int | None, rule: GrantRule, reason: str) -> GrantCells:
    claim = share.claim
    return GrantCells(share.deployment, share.region, claim.asked, claim.granted, granted, rule, reason)
