"""One pass of the reconciler: load a snapshot, plan, apply; again until there is nothing left to decide.

Rows that one pass has loaded the next one need not load again (`FleetCache`); nothing else is kept between passes. A
crash anywhere leaves PostgreSQL as the last whole step made it, and the next pass, of whatever process, goes on from
there.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from django.db import IntegrityError

from fleet.planning.decisions import (
    ChangeRollout,
    CloseIncident,
    CloseReplacement,
    CordonNode,
    CreateCell,
    Decision,
    DrainCell,
    ExplainCell,
    LaunchNodes,
    MoveCell,
    MoveNode,
    NoteIncident,
    OpenIncident,
    ReplaceNode,
    RequestReplacement,
    RestartAgent,
    RetireNode,
    StartCell,
    StopCell,
)
from fleet.planning.planners import LEASE_TTL_S, MAX_ROUNDS, PLANNERS
from fleet.planning.settings import FleetSettings
from fleet.selectors.fleet_cache import FleetCache
from fleet.selectors.snapshot import fleet_view
from fleet.services import cell as cells
from fleet.services import incident as incidents
from fleet.services import node as nodes
from fleet.services import replacement as replacements
from fleet.services import rollout as rollouts
from kernel import clock
from kernel.leases import lease_release, lease_take, this_holder
from kernel.transitions import StaleDecision

LEASE = "reconciler"

log = logging.getLogger(__name__)


def reconcile(*, settings: FleetSettings | None = None, cache: FleetCache | None = None) -> int:
    """Run a pass unless another process does. Returns the number of decisions applied."""
    return reconcile_alone(settings=settings, cache=cache) or 0


def reconcile_alone(*, settings: FleetSettings | None = None, cache: FleetCache | None = None) -> int | None:
    """Run a pass; None: another process does. Returns the number of decisions applied. `cache`: of earlier passes."""
    chosen, known = settings or FleetSettings(), cache or FleetCache()
    holder = this_holder()
    if lease_take(name=LEASE, holder=holder, ttl_s=LEASE_TTL_S, now=clock.now()) is None:
        return None
    try:
        return _run_rounds(chosen, holder, known)
    finally:
        lease_release(name=LEASE, holder=holder, now=clock.now())


def _run_rounds(settings: FleetSettings, holder: str, cache: FleetCache) -> int:
    applied = 0
    for _ in range(MAX_ROUNDS):
        done = _run_round(settings, holder, cache)
        applied += done
        if not done:
            break
    return applied


def _run_round(settings: FleetSettings, holder: str, cache: FleetCache) -> int:
    """The first planner whose decisions change something ends the round: the next one needs to see what it changed."""
    now = clock.now()
    view = fleet_view(now=now, settings=settings, cache=cache)
    for planner in PLANNERS:
        done = 0
        for decision in planner(view, settings, now):
            # Who has lost the lease meanwhile leaves the rest to the new holder.
            if lease_take(name=LEASE, holder=holder, ttl_s=LEASE_TTL_S, now=clock.now()) is None:
                log.warning("another reconciler took over")
                return done
            done += _apply_one(decision)
        if done:
            return done
    return 0


def _apply_one(decision: Decision) -> bool:
    try:
        apply(decision, clock.now())
    except (StaleDecision, IntegrityError) as stale:
        log.info("dropped, the next pass replans: %s (%s)", decision, stale)
        return False
    log.info("%s", decision)
    return True


def apply(decision: Decision, now: datetime) -> None:
    """Carry out one decision.

    Raises:
        StaleDecision: what the decision saw is no longer so.
    """
    APPLY[type(decision)](decision, now=now)


APPLY: Mapping[type[Decision], Callable[..., None]] = {
    MoveNode: nodes.node_move,
    RestartAgent: nodes.agent_restart,
    RetireNode: nodes.node_retire,
    LaunchNodes: nodes.nodes_launch,
    CreateCell: cells.cell_create,
    StartCell: cells.cell_start,
    DrainCell: cells.cell_drain_charged,
    MoveCell: cells.cell_move,
    ExplainCell: cells.cell_explain,
    StopCell: cells.cell_stop,
    ChangeRollout: rollouts.rollout_change,
    CordonNode: replacements.node_cordon_faulty,
    ReplaceNode: replacements.node_replace,
    RequestReplacement: replacements.replacement_schedule,
    CloseReplacement: replacements.replacement_close,
    OpenIncident: incidents.incident_open_decided,
    NoteIncident: incidents.incident_note,
    CloseIncident: incidents.incident_close,
}
"""The service that applies each type of decision."""
