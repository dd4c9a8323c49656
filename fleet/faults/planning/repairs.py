"""Decides about nodes that are out of use for a fault: which rung of the ladder (`ladder`) each tries next, when an
attempt is over, and whether the node returns to service. Other nodes have taken their places by then, so a repair costs
no availability. A node whose ladder ends with its replacement is retired by `fleet.placement.planning.supply`.

Nodes with the same broken machine or device are repaired together: one of them climbs the ladder, and the result counts
for all. A reboot waits for other repairs on its machine, and they wait for it: it would end their deep checks."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta

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
    running = _running_rungs(fleet, settings, now)
    for node in fleet.nodes.values():
        ladder = _ladder_to_climb(fleet, node, settings, now)
        if ladder is None:
            continue
        with_it = _repaired_with(fleet, node, settings)
        together = [one for one in with_it if _may_climb(fleet, one)]
        if ladder.running is not None:
            if ladder.running.node == node.id:
                yield from _follow(fleet, node, together, ladder, ladder.running, settings, now)
        elif ladder.next is not None and ladder.next in REPAIRING:
            waits = node.id != together[0].id or any(fleet.cell_of(one.id) for one in with_it)
            others = running[node.machine]
            if not waits and not (others and Rung.REBOOT in (ladder.next, *others)):
                others.append(ladder.next)
                yield TryRepair(node.id, ladder.next, ladder.reason, ladder.devices)


def _running_rungs(fleet: FleetView, settings: FaultSettings, now: datetime) -> dict[str, list[Rung]]:
    """Machine -> the rungs of its attempts. One that is later than its limit is forgotten: an operator may have taken
    its node over."""
    running: dict[str, list[Rung]] = defaultdict(list)
    since = now - timedelta(seconds=settings.reboot_limit_s)
    for name in fleet.faults.attempts.keys() & fleet.nodes.keys():
        node = fleet.nodes[name]
        rungs = (one.rung for one in _attempts_of(fleet, node) if one.ended_at is None and one.at >= since)
        running[node.machine].extend(rungs)
    return running


def is_under_repair(fleet: FleetView, node: NodeView, settings: FaultSettings, now: datetime) -> bool:
    """Whether a node that is out of use stays, because a repair runs or is next."""
    ladder = _ladder_to_climb(fleet, node, settings, now)
    return ladder is not None and (ladder.running is not None or ladder.next in REPAIRING)


def ladder_of(fleet: FleetView, node: NodeView, settings: FaultSettings, now: datetime) -> Ladder | None:
    """The ladder of a node if it, its machine or one of its devices has hard signals, in use or not; else None."""
    signals = _signals_about(fleet, node, settings)
    together = _repaired_with(fleet, node, settings)
    attempts = sorted((one for other in together for one in _attempts_of(fleet, other)), key=lambda one: one.at)
    if not signals and not any(attempt.ended_at is None for attempt in attempts):
        return None
    scope = FaultScope.MACHINE if any(s.scope is FaultScope.MACHINE for s in signals) else FaultScope.DEVICE
    others = [n.id for n in fleet.nodes_of(node.machine) if n.id != node.id and n.state not in DEAD]
    impossible = why_impossible(
        device_count=node.devices,
        devices=[signal.device for signal in signals if signal.device],
        is_connected=node.report.connected,
        scope=scope,
        no_reboot=_why_no_reboot(fleet, node),
        others=others,
        sharing=[one.id for one in together if one.id != node.id and one.state not in DEAD],
    )
    return plan_ladder(signals, impossible, attempts, settings, now)


def _why_no_reboot(fleet: FleetView, node: NodeView) -> str:
    region = fleet.regions[node.region]
    if region.limits.has_power_control or node.id in fleet.faults.may_reboot:
        return ""
    return "its provider has no power control" if region.free is None else "its host's operator does not allow reboots"


def _ladder_to_climb(fleet: FleetView, node: NodeView, settings: FaultSettings, now: datetime) -> Ladder | None:
    return ladder_of(fleet, node, settings, now) if _may_climb(fleet, node) else None


def _is_out_of_use(node: NodeView) -> bool:
    return node.state is NodeState.FAULTY and node.ordered is not ProviderAction.TERMINATE


def _may_climb(fleet: FleetView, node: NodeView) -> bool:
    is_free = fleet.cell_of(node.id) is None and not fleet.faults.is_held(node.id, NEEDS_OPERATOR)
    goes = any(one.node == node.id and one.rule in NOT_REPAIRED for one in fleet.faults.replacements)
    return _is_out_of_use(node) and is_free and not goes


def _attempts_of(fleet: FleetView, node: NodeView) -> tuple[Attempt, ...]:
    """Without attempts that never end, because their node is retired or returned."""
    found = fleet.faults.attempts.get(node.id, ())
    return found if _is_out_of_use(node) else tuple(one for one in found if one.ended_at is not None)


def _users_of(fleet: FleetView, signal: SignalView, machine: str) -> frozenset[str]:
    """The nodes of a machine that a signal of one of them concerns."""
    if signal.scope is FaultScope.MACHINE:
        return frozenset(node.id for node in fleet.nodes_of(machine))
    return frozenset({signal.node, *fleet.faults.sharing.get((machine, signal.device), ())})


def _repaired_with(fleet: FleetView, node: NodeView, settings: FaultSettings) -> tuple[NodeView, ...]:
    """The nodes that have a broken machine or device in common with a node, and itself."""
    about = _signals_about(fleet, node, settings)
    names = frozenset({node.id}).union(*(_users_of(fleet, signal, node.machine) for signal in about))
    return tuple(fleet.nodes[name] for name in sorted(names) if name in fleet.nodes)


def _signals_about(fleet: FleetView, node: NodeView, settings: FaultSettings) -> tuple[SignalView, ...]:
    found = []
    for signal in fleet.faults.signals:
        if signal.settled or not is_grave(signal, settings):
            continue
        seen_by = fleet.nodes.get(signal.node)
        is_here = seen_by is not None and seen_by.machine == node.machine
        if signal.node == node.id or (is_here and node.id in _users_of(fleet, signal, node.machine)):
            found.append(signal)
    return tuple(found)


def _follow(
    fleet: FleetView,
    node: NodeView,
    together: Collection[NodeView],
    ladder: Ladder,
    attempt: Attempt,
    settings: FaultSettings,
    now: datetime,
) -> Iterator[Decision]:
    back_at = node.report.connection_changed_at
    is_back = node.report.connected and node.ordered is None and back_at is not None and back_at > attempt.at
    if attempt.rung is Rung.REBOOT and not attempt.request and is_back:
        yield CheckRepair(attempt.id, node.id)
        return
    names = {one.id for one in together}
    again = [
        signal.summary
        for signal in fleet.faults.signals
        if signal.node in names and attempt.rung is Rung.REBOOT and back_at is not None and signal.last_at > back_at
    ]
    verdict = verdict_of(attempt, again, settings, now)
    if verdict is not None:
        steps = tuple(step.as_evidence() for step in ladder.steps)
        others = tuple(sorted(names - {node.id}))
        yield EndRepair(attempt.id, node.id, attempt.rung, *verdict, ladder=steps, others=others)
