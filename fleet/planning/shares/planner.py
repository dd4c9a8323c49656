"""Decides how many of the cells that were set each deployment may have while machines are short. Pure.

It limits and gives back; cells go and come as ever, by the reconciler and under the disruption ledger. What was taken
is not given back for `ShareSettings.kept_s`, and then only what nobody waits for who goes before.
"""

import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from fleet.planning.claims import GrantRule
from fleet.planning.decisions import Decision, GrantCells
from fleet.planning.settings import FleetSettings
from fleet.planning.shares.preemption import PoolState, Preemption, pool_states
from fleet.planning.shares.quotas import QuotaLimit, machines_held, plan_quotas
from fleet.planning.shares.turns import Place, Share, shares_of
from fleet.planning.snapshot import WITHOUT_MACHINES, FleetView

TAKEN = frozenset({GrantRule.RECLAIM, GrantRule.PRIORITY})
"""Rules by which cells were taken away."""


def plan_shares(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Changes of what places may have: less by quota, less for others, more again."""
    if not _has_work(fleet):
        return ()
    shares = shares_of(fleet)
    quotas = plan_quotas(shares.values(), fleet.quotas, machines_held(fleet))
    bounded = [one for share in shares.values() if (one := _bounded(share, quotas.limits.get(share.place))) is not None]
    if bounded:
        return tuple(bounded)  # what others may take depends on these
    states = pool_states(fleet, shares, settings, now)
    preemption = Preemption(fleet, settings, now, quotas)
    for state in states:
        preemption.plan(state)
    if preemption.grants:
        return tuple(preemption.grants.values())
    return tuple(one for state in states for one in _returns(state, quotas.limits, settings.shares.kept_s, now))


def _has_work(fleet: FleetView) -> bool:
    """In a fleet without quotas in which nothing waits and nothing is withheld there is nothing to decide."""
    is_limited = any(claim.granted is not None for spec in fleet.deployments.values() for claim in spec.claims.values())
    return bool(fleet.quotas) or is_limited or any(cell.state in WITHOUT_MACHINES for cell in fleet.cells.values())


def _bounded(share: Share, limit: QuotaLimit | None) -> GrantCells | None:
    """Less than it has now, because its team's quota allows no more."""
    if limit is None or limit.cells >= share.claim.in_force:
        return None
    rule = GrantRule.RECLAIM if share.kept > limit.cells else GrantRule.QUOTA
    return _grant(share, limit.cells, rule, limit.reason)


def _returns(
    state: PoolState, limits: Mapping[Place, QuotaLimit], kept_s: float, now: datetime
) -> Iterator[GrantCells]:
    """More for those of whom something is withheld, in turn: up to their quota, and where cells were taken for others
    only as far as machines are free that nobody waits for. Where machines are bought, that cannot be known."""
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
