"""Which planners make up a round, and in which order: the first whose decisions change something ends it. And who may
run one: whoever holds a lease.

The live reconciler and the simulator run these and no others.
"""

from collections.abc import Callable
from datetime import datetime

from fleet.planning.decisions import Decision
from fleet.planning.faults.liveness import plan_liveness
from fleet.planning.faults.notices import plan_notices
from fleet.planning.faults.planner import plan_faults
from fleet.planning.reconcile.cell_health import plan_health
from fleet.planning.reconcile.planner import plan_reconcile
from fleet.planning.rollout.planner import plan_rollout
from fleet.planning.settings import FleetSettings
from fleet.planning.shares.planner import plan_shares
from fleet.planning.snapshot import FleetView

Planner = Callable[[FleetView, FleetSettings, datetime], tuple[Decision, ...]]

PLANNERS: tuple[Planner, ...] = (
    plan_liveness, plan_notices, plan_faults, plan_health, plan_rollout, plan_shares, plan_reconcile,
)  # fmt: skip
MAX_ROUNDS = 6
"""Rounds of one pass; what is left is for the next."""

LEASE_TTL_S = 5.0
"""A worker killed in the middle of a pass holds up the next for this long; with its own start that stays below the
15 s of I8. It is renewed every second, between decisions, each of which takes a fraction of it."""
