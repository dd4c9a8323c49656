"""Decides about nodes that are out of use for a fault: which rung of the ladder (`ladder`) each tries next, when an
attempt is over, and whether the node returns to service. Other nodes have taken their places by then, so a repair costs
no availability. A node whose ladder ends with its replacement is retired by `fleet.placement.planning.supply`."""

from collections.abc import Iterator
from datetime import datetime

from engine_agent.protocol.signatures import FaultScope
from fleet.faults.planning.ladder import REPAIRING, Ladder, is_grave, plan_ladder, verdict_of, why_impossible
from fleet.faults.planning.views import NEEDS_OPERATOR, Attempt, Rule, Rung, SignalView
from fleet.reconcile.planning.decisions import CheckRepair, Decision, EndRepair, TryRepair
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.snapshot import FleetView, NodeView
from fleet.reconcile.planning.states import DEAD, NodeState, ProviderAction

NOT_REPAIRED = frozenset({Rule.OPERATOR, Rule.NOTICE})
"""Replacements whose machine goes although a repair might cure it."""


def plan_repairs(fleet: FleetView, settings: FaultSettings, now: datetime) -> Iterator[Decision]:
    for node in fleet.nodes.values():
        ladder = _ladder_to_climb(fleet, node, settings, now)
        if ladder is None:
            continue
        if ladder.running is not None:
            yield from _follow(fleet, node, ladder, ladder.running, settings, now)
        elif ladder.next in REPAIRING and ladder.next is not None:
            yield TryRepair(node.id, ladder.next, ladder.reason, ladder.devices)


def is_under_repair(fleet: FleetView, node: NodeView, settings: FaultSettings, now: datetime) -> bool:
    """Whether a node that is out of use stays, because a repair runs or is next."""
    ladder = _ladder_to_climb(fleet, node, settings, now)
    return ladder is not None and (ladder.running is not None or ladder.next in REPAIRING)


def ladder_of(fleet: FleetView, node: NodeView, settings: FaultSettings, now: datetime) -> Ladder | None:
    """The ladder of a node if it or its machine has hard signals, in use or not; else None."""
    signals = _signals_about(fleet, node, settings)
    attempts = fleet.faults.attempts.get(node.id, ())
    if not signals and not any(attempt.ended_at is None for attempt in attempts):
        return None
    scope = FaultScope.MACHINE if any(s.scope is FaultScope.MACHINE for s in signals) else FaultScope.DEVICE
    others = [n.id for n in fleet.nodes_of(node.machine) if n.id != node.id and n.state not in DEAD]
    impossible = why_impossible(
        device_count=node.devices,
        devices=[signal.device for signal in signals if signal.device],
        is_connected=node.report.connected,
        scope=scope,
        has_power_control=fleet.regions[node.region].limits.has_power_control,
        others=others,
    )
    return plan_ladder(signals, impossible, attempts, settings, now)


def _ladder_to_climb(fleet: FleetView, node: NodeView, settings: FaultSettings, now: datetime) -> Ladder | None:
    if node.state is not NodeState.FAULTY or node.ordered is ProviderAction.TERMINATE:
        return None
    if fleet.cell_of(node.id) is not None or fleet.faults.is_held(node.id, NEEDS_OPERATOR):
        return None
    if any(one.node == node.id and one.rule in NOT_REPAIRED for one in fleet.faults.replacements):
        return None
    return ladder_of(fleet, node, settings, now)


def _signals_about(fleet: FleetView, node: NodeView, settings: FaultSettings) -> tuple[SignalView, ...]:
    found = []
    for signal in fleet.faults.signals:
        if signal.settled or not is_grave(signal, settings):
            continue
        seen_by = fleet.nodes.get(signal.node)
        is_of_machine = signal.scope is FaultScope.MACHINE and seen_by is not None and seen_by.machine == node.machine
        if signal.node == node.id or is_of_machine:
            found.append(signal)
    return tuple(found)


def _follow(
    fleet: FleetView, node: NodeView, ladder: Ladder, attempt: Attempt, settings: FaultSettings, now: datetime
) -> Iterator[Decision]:
    back_at = node.report.connection_changed_at
    is_back = node.report.connected and node.ordered is None and back_at is not None and back_at > attempt.at
    if attempt.rung is Rung.REBOOT and not attempt.request and is_back:
        yield CheckRepair(attempt.id, node.id)
        return
    again = [
        signal.summary
        for signal in fleet.faults.signals
        if signal.node == node.id and attempt.rung is Rung.REBOOT and back_at is not None and signal.last_at > back_at
    ]
    verdict = verdict_of(attempt, again, settings, now)
    if verdict is not None:
        steps = tuple(step.as_evidence() for step in ladder.steps)
        yield EndRepair(attempt.id, node.id, attempt.rung, *verdict, ladder=steps)
