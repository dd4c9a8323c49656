"""Runs one pass of the reconciler: loads a snapshot, plans, applies, and repeats until there is nothing to decide.
`FleetCache` keeps rows between passes; no other state is kept. After a crash, PostgreSQL holds the last complete step,
and the next pass of any process continues."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from time import monotonic

from django.db import IntegrityError

from fleet.cells import services as cells
from fleet.faults.services import incidents, repairs
from fleet.faults.services import incidents as replacements
from fleet.machines.services import layouts
from fleet.nodes.services import nodes
from fleet.quotas import services as shares
from fleet.reconcile.planning.decisions import (
    ChangeLayout,
    ChangeRollout,
    CheckRepair,
    CloseIncident,
    CloseReplacement,
    CordonNode,
    CreateCell,
    Decision,
    DrainCell,
    EndRepair,
    ExplainCell,
    GrantCells,
    LaunchNodes,
    MoveCell,
    MoveNode,
    NoteIncident,
    OpenIncident,
    OrderPrefetch,
    ReplaceNode,
    RequestReplacement,
    RestartAgent,
    RetireNode,
    StartCell,
    StopCell,
    TryRepair,
    UncordonNode,
)
from fleet.reconcile.planning.planner import LEASE_TTL_S, MAX_ROUNDS, PLANNERS
from fleet.reconcile.planning.rest import rest_s
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.states import NodeState
from fleet.reconcile.selectors.cache import FleetCache
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.recorder.planning.loops import Decided, Round
from fleet.recorder.services import Recorder
from fleet.rollouts import services as rollouts
from kernel import clock, wake_ups
from kernel.leases import lease_release, lease_take, this_holder
from kernel.transitions import StaleDecision

LEASE = "reconciler"
RENEW_EVERY_S = 1.0
MOVES_AT_ONCE = 500
"""Nodes per transaction: about 50 ms in which they are locked."""
LOADS_PER_PASS = 1.5
"""A fleet that takes longer to load gets longer passes: loading is at most two thirds of one."""

log = logging.getLogger(__name__)


def reconcile(*, settings: FleetSettings | None = None, cache: FleetCache | None = None) -> int:
    """Runs a pass unless another process does. Returns the number of applied decisions."""
    return reconcile_alone(settings=settings, cache=cache) or 0


def reconcile_alone(
    *,
    settings: FleetSettings | None = None,
    cache: FleetCache | None = None,
    limit_s: float = math.inf,
    recorder: Recorder | None = None,
    rest: Callable[[float], None] = lambda _: None,
) -> int | None:
    """Runs a pass, or returns None if another process does. Returns the number of applied decisions. `cache`: of
    earlier passes. A pass that exceeds `limit_s` or `LOADS_PER_PASS` times its first load stops and wakes the next one,
    because newer events may be more urgent. `recorder`: stores what was decided, after the lease is released. `rest` is
    called with the seconds for which no pass is needed unless something changes."""
    one = _Pass(settings or FleetSettings(), cache or FleetCache(), limit_s)
    if not one.holds_lease():
        return None
    try:
        applied = one.run()
        rest(one.rest_s)
        return applied
    finally:
        lease_release(name=LEASE, holder=one.holder, now=clock.now())
        if recorder is not None:
            recorder.record(one.rounds)
        if one.is_cut:
            wake_ups.send("fleet.reconcile")


class _Pass:
    """`is_cut`: it ran out of time and left decisions over. `rounds`: those that changed something. `rest_s`: seconds
    for which no pass is needed unless something changes."""

    def __init__(self, settings: FleetSettings, cache: FleetCache, limit_s: float) -> None:
        self.holder = this_holder()
        self.is_cut = False
        self.rest_s = 0.0
        self.rounds: list[Round] = []
        self._settings = settings
        self._cache = cache
        self._began_s = monotonic()
        self._limit_s = limit_s
        self._over_s: float | None = None
        self._renewed_s = -math.inf

    def holds_lease(self) -> bool:
        """Whether this process holds the lease. Renewed every second; decisions of another process make ours stale."""
        now_s = monotonic()
        if now_s - self._renewed_s >= RENEW_EVERY_S:
            if lease_take(name=LEASE, holder=self.holder, ttl_s=LEASE_TTL_S, now=clock.now()) is None:
                return False
            self._renewed_s = now_s
        return True

    def run(self) -> int:
        applied = 0
        for _ in range(MAX_ROUNDS):
            done = self._run_round()
            applied += done
            self.is_cut = self.is_cut or (done > 0 and self._is_over())
            if not done or self.is_cut:
                break
        return applied

    def _run_round(self) -> int:
        """The first planner whose decisions change something ends the round, because the next one must see the
        changes."""
        now = clock.now()
        view = fleet_view(now=now, settings=self._settings, cache=self._cache)
        decided: list[Decided] = []
        for planner in PLANNERS:
            decisions = planner(view, self._settings, now)
            applied = {id(decision) for decision in self._apply_all(decisions)}
            if decisions:
                flags = tuple(id(decision) in applied for decision in decisions)
                decided.append(Decided(planner.__name__, decisions, flags))
            if applied:
                self.rounds.append(Round(view, self._settings, now, tuple(decided)))
                return len(applied)
        self.rest_s = 0.0 if decided else rest_s(view, now)
        return 0

    def _apply_all(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Returns the decisions that were applied."""
        steps = list(_steps(decisions))
        if steps and self._over_s is None:
            looked_s = monotonic() - self._began_s
            self._over_s = self._began_s + max(self._limit_s, LOADS_PER_PASS * looked_s)
        done: list[Decision] = []
        self._renewed_s = -math.inf  # planning may have taken long
        for position, step in enumerate(steps):
            if position and self._is_over():
                self.is_cut = True
                break
            # After losing the lease, the rest is left to its new holder.
            if not self.holds_lease():
                log.warning("another reconciler took over")
                break
            done += _move_nodes(step) if isinstance(step, list) else _apply_one(step)
        return done

    def _is_over(self) -> bool:
        return self._over_s is not None and monotonic() >= self._over_s


def _steps(decisions: Iterable[Decision]) -> Iterator[Decision | list[MoveNode]]:
    """Each decision alone, but first the nodes that change their state without being lost, up to `MOVES_AT_ONCE`
    together: after an outage of web that is the whole fleet."""
    moves: list[MoveNode] = []
    alone: list[Decision] = []
    for each in decisions:
        if isinstance(each, MoveNode) and each.to is not NodeState.LOST:
            moves.append(each)
        else:
            alone.append(each)
    for first in range(0, len(moves), MOVES_AT_ONCE):
        yield moves[first : first + MOVES_AT_ONCE]
    yield from alone


def _move_nodes(moves: list[MoveNode]) -> list[MoveNode]:
    moved = nodes.nodes_move(moves, now=clock.now())
    applied = {move.node for move in moved}
    for move in moves:
        log.info("%s" if move.node in applied else "dropped, the next pass replans: %s", move)
    return [move for move in moves if move.node in applied]


def _apply_one(decision: Decision) -> list[Decision]:
    try:
        apply(decision, clock.now())
    except (StaleDecision, IntegrityError) as stale:
        log.info("dropped, the next pass replans: %s (%s)", decision, stale)
        return []
    log.info("%s", decision)
    return [decision]


def apply(decision: Decision, now: datetime) -> None:
    """Applies one decision. Raises StaleDecision if the decision's premises have changed."""
    APPLY[type(decision)](decision, now=now)


APPLY: Mapping[type[Decision], Callable[..., None]] = {
    MoveNode: nodes.node_move,
    RestartAgent: nodes.agent_restart,
    RetireNode: nodes.node_retire,
    LaunchNodes: nodes.nodes_launch,
    ChangeLayout: layouts.layout_change,
    GrantCells: shares.cells_grant,
    CreateCell: cells.cell_create,
    StartCell: cells.cell_start,
    DrainCell: cells.cell_drain_charged,
    MoveCell: cells.cell_move,
    ExplainCell: cells.cell_explain,
    StopCell: cells.cell_stop,
    ChangeRollout: rollouts.rollout_change,
    CordonNode: replacements.node_cordon_faulty,
    UncordonNode: replacements.node_uncordon_called_off,
    ReplaceNode: replacements.node_replace,
    RequestReplacement: replacements.replacement_schedule,
    CloseReplacement: replacements.replacement_close,
    TryRepair: repairs.repair_try,
    CheckRepair: repairs.repair_check,
    EndRepair: repairs.repair_end,
    OpenIncident: incidents.incident_open_decided,
    NoteIncident: incidents.incident_note,
    CloseIncident: incidents.incident_close,
    OrderPrefetch: nodes.prefetch_order,
}
"""The service that applies each type of decision."""
