"""One pass of the reconciler: load a snapshot, plan, apply; again until there is nothing left to decide.

Holds no state between passes. A crash anywhere leaves PostgreSQL as the last whole step made it, and the next pass
goes on from there.
"""

import logging
from datetime import datetime
from functools import singledispatch

from django.db import IntegrityError

from fleet.models import Node
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
    RestartAgent,
    RetireNode,
    StartCell,
    StopCell,
    WishReplacement,
)
from fleet.planning.faults.liveness import nodes_in_doubt
from fleet.planning.planners import LEASE_TTL_S, MAX_ROUNDS, PLANNERS
from fleet.planning.settings import FleetSettings
from fleet.planning.snapshot import FleetView, ProviderStatus
from fleet.providers import provider_named
from fleet.providers.base import ProviderError
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


def reconcile(*, settings: FleetSettings | None = None) -> int:
    """Run a pass unless somebody else does. Returns the number of decisions applied."""
    chosen = settings or FleetSettings()
    holder = this_holder()
    if lease_take(name=LEASE, holder=holder, ttl_s=LEASE_TTL_S, now=clock.now()) is None:
        return 0
    try:
        return _rounds(chosen, holder)
    finally:
        lease_release(name=LEASE, holder=holder, now=clock.now())


def _rounds(settings: FleetSettings, holder: str) -> int:
    applied = 0
    for _ in range(MAX_ROUNDS):
        done = _round(settings, holder)
        applied += done
        if not done:
            break
    return applied


def _round(settings: FleetSettings, holder: str) -> int:
    """The first planner whose decisions change something ends the round: the next one needs to see what it changed."""
    now = clock.now()
    view = _view(settings, now)
    for planner in PLANNERS:
        done = 0
        for decision in planner(view, settings, now):
            # Providers take their time: who has lost the lease meanwhile leaves the rest to the new holder.
            if lease_take(name=LEASE, holder=holder, ttl_s=LEASE_TTL_S, now=clock.now()) is None:
                log.warning("another reconciler took over")
                return done
            done += _apply_one(decision)
        if done:
            return done
    return 0


def _view(settings: FleetSettings, now: datetime) -> FleetView:
    view = fleet_view(now=now)
    doubt = nodes_in_doubt(view, settings, now)
    return fleet_view(now=now, provider=_ask_providers(doubt)) if doubt else view


def _ask_providers(node_ids: tuple[str, ...]) -> dict[str, ProviderStatus]:
    by_provider: dict[str, list[str]] = {}
    for node_id, provider in Node.objects.filter(id__in=node_ids).values_list("id", "region__provider"):
        by_provider.setdefault(provider, []).append(node_id)
    said: dict[str, ProviderStatus] = {}
    for provider, ids in by_provider.items():
        try:
            said |= provider_named(provider).describe(ids)
        except ProviderError as error:
            log.warning("provider %s did not answer: %s", provider, error)
    return said


def _apply_one(decision: Decision) -> bool:
    try:
        apply(decision, clock.now())
    except (StaleDecision, IntegrityError) as stale:
        log.info("dropped, the next pass replans: %s (%s)", decision, stale)
        return False
    except ProviderError as error:
        log.error("%s: %s", decision, error)
        return False
    log.info("%s", decision)
    return True


@singledispatch
def apply(decision: object, now: datetime) -> None:
    """Carry out one decision.

    Raises:
        StaleDecision: what the decision saw is no longer so.
        ProviderError: a provider refused.
    """
    raise TypeError(f"no way to apply {decision!r}")


@apply.register
def _(decision: MoveNode, now: datetime) -> None:
    nodes.node_move(decision, now=now)


@apply.register
def _(decision: RestartAgent, now: datetime) -> None:
    nodes.agent_restart(decision, now=now)


@apply.register
def _(decision: RetireNode, now: datetime) -> None:
    nodes.node_retire(decision, now=now)


@apply.register
def _(decision: LaunchNodes, now: datetime) -> None:
    nodes.nodes_launch(decision, now=now)


@apply.register
def _(decision: CreateCell, now: datetime) -> None:
    cells.cell_create(decision, now=now)


@apply.register
def _(decision: StartCell, now: datetime) -> None:
    cells.cell_start(decision, now=now)


@apply.register
def _(decision: DrainCell, now: datetime) -> None:
    cells.cell_drain_charged(decision, now=now)


@apply.register
def _(decision: MoveCell, now: datetime) -> None:
    cells.cell_move(decision, now=now)


@apply.register
def _(decision: ExplainCell, now: datetime) -> None:
    cells.cell_explain(decision, now=now)


@apply.register
def _(decision: StopCell, now: datetime) -> None:
    cells.cell_stop(decision, now=now)


@apply.register
def _(decision: ChangeRollout, now: datetime) -> None:
    rollouts.rollout_change(decision, now=now)


@apply.register
def _(decision: CordonNode, now: datetime) -> None:
    replacements.node_cordon_faulty(decision, now=now)


@apply.register
def _(decision: ReplaceNode, now: datetime) -> None:
    replacements.node_replace(decision, now=now)


@apply.register
def _(decision: WishReplacement, now: datetime) -> None:
    replacements.replacement_wish(decision, now=now)


@apply.register
def _(decision: CloseReplacement, now: datetime) -> None:
    replacements.replacement_close(decision, now=now)


@apply.register
def _(decision: OpenIncident, now: datetime) -> None:
    incidents.incident_open_decided(decision, now=now)


@apply.register
def _(decision: NoteIncident, now: datetime) -> None:
    incidents.incident_note(decision, now=now)


@apply.register
def _(decision: CloseIncident, now: datetime) -> None:
    incidents.incident_close(decision, now=now)
