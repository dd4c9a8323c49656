"""Decides which nodes, machines and cells are suspected, of what and with which evidence: hard signatures, repeated
repairs, slow nodes, and faults with a common cause. It never blames a single machine for a fault that more than a third
of a cohort shares: then a version, a driver or a switch is at fault. `planner` decides what follows.

Faults of a device concern only the nodes that use it, and are one suspicion; the other nodes of its machine continue.
Faults of a machine with several nodes (its memory, its network, a device that its driver cannot name, or the same fault
on most of its nodes) are one suspicion of the machine and concern all of its nodes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from engine_agent.protocol.signatures import UNATTRIBUTED_SIGNATURES, FaultScope, is_hard
from fleet.faults.planning.ladder import is_grave
from fleet.faults.planning.slow import SlowNode
from fleet.faults.planning.views import IncidentKind, Rule, SignalView
from fleet.placement.planning.distance import common_prefix
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NodeState

NOT_IN_SERVICE = frozenset({NodeState.JOINING, NodeState.RETIRED})


@dataclass(frozen=True, slots=True)
class CommonCause:
    """A fault that much of a cohort shares; fault and cohort are the subject of its incident. `affected`: nodes, or
    whole cells; `deployments`: those whose rollouts must halt; `place`: network nodes that all affected nodes share."""

    fault: str
    cohort: str
    affected: tuple[str, ...]
    size: int
    deployments: frozenset[str]
    place: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return f"{self.fault}: {self.cohort}"

    @property
    def summary(self) -> str:
        return f"Common cause: {self.fault} in {len(self.affected)} of {self.size} {self.cohort}"


def find_common_causes(
    fleet: FleetView, slow: Iterable[SlowNode], settings: FaultSettings, now: datetime
) -> tuple[CommonCause, ...]:
    """All current common causes, in a stable order."""
    causes = [
        *_causes_in_signals(fleet, settings, now),
        *_causes_in_slow_nodes(fleet, slow, settings),
        *_causes_in_cells(fleet, settings),
    ]
    return tuple(sorted(causes, key=lambda cause: cause.subject))


def is_common(affected: int, size: int, settings: FaultSettings) -> bool:
    """Whether so many of a cohort of this size are unlikely by chance."""
    return affected >= settings.common_cause_nodes and affected > settings.common_cause_share * size


def _causes_in_signals(fleet: FleetView, settings: FaultSettings, now: datetime) -> Iterable[CommonCause]:
    """Settled signals count as well, so that a cause that condemns machines one after the other is seen."""
    since = now - timedelta(seconds=settings.common_cause_window_s)
    affected: dict[tuple[str, str], set[str]] = defaultdict(set)
    for signal in fleet.faults.signals:
        if signal.last_at >= since:
            affected[signal.signature, signal.instance_type].add(signal.node)
    in_service: dict[str, list[str]] = defaultdict(list)
    for node in fleet.nodes.values():
        if node.state not in NOT_IN_SERVICE:
            in_service[node.instance_type].append(node.id)
    for (signature, kind), nodes in affected.items():
        cohort = nodes.union(in_service[kind])
        if is_common(_machines(fleet, nodes), _machines(fleet, cohort), settings):
            yield _cause_in_nodes(fleet, signature, f"nodes of {kind}", nodes, len(cohort))


def _causes_in_slow_nodes(fleet: FleetView, slow: Iterable[SlowNode], settings: FaultSettings) -> Iterable[CommonCause]:
    cohorts: dict[str, list[SlowNode]] = defaultdict(list)
    for node in slow:
        cohorts[str(node.cohort)].append(node)
    for cohort, nodes in cohorts.items():
        names, everyone = [slow_node.node for slow_node in nodes], nodes[0].cohort_nodes
        if is_common(_machines(fleet, names), _machines(fleet, everyone), settings):
            yield _cause_in_nodes(fleet, "slow", cohort, names, len(everyone))


def _machines(fleet: FleetView, nodes: Iterable[str]) -> int:
    """The number of machines that these nodes are on: a fault of one machine hits all of its nodes."""
    return len({fleet.nodes[node].machine if node in fleet.nodes else node for node in nodes})


def _cause_in_nodes(fleet: FleetView, fault: str, cohort: str, nodes: Iterable[str], size: int) -> CommonCause:
    names = tuple(sorted(nodes))
    here = [fleet.nodes[name].topology for name in names if name in fleet.nodes]
    return CommonCause(
        fault, cohort, names, size, _deployments_on(fleet, set(names)), common_prefix(here) if here else ()
    )


def _causes_in_cells(fleet: FleetView, settings: FaultSettings) -> Iterable[CommonCause]:
    """Counts failed cells only. Cells that lost a node may share nothing else."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    failed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in fleet.cells.values():
        key = (cell.deployment, cell.version)
        cells[key].append(cell.id)
        if cell.state is CellState.FAILED:
            failed[key].append(cell.id)
    for key, names in failed.items():
        if is_common(len(names), len(cells[key]), settings):
            cohort = f"cells of {key[0]}" + (f" at {key[1]}" if key[1] else "")
            yield CommonCause("failed", cohort, tuple(sorted(names)), len(cells[key]), frozenset({key[0]}))


def _deployments_on(fleet: FleetView, nodes: set[str]) -> frozenset[str]:
    return frozenset(cell.deployment for cell in fleet.cells.values() if any(m.node in nodes for m in cell.members))


ACCUSABLE = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.FAULTY})


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A reason for an incident about a node, a machine or a cell. Nothing is replaced if `rule` is None. `is_urgent`:
    the cell must stop serving now; otherwise it is drained first. `faults`, `cohort`: the common cause that it may be
    part of. `nodes`: all nodes that it concerns; `node` is None if it is about a machine, or a device, of several."""

    kind: IncidentKind
    subject: str
    reason: str
    node: NodeView | None = None
    cell: CellView | None = None
    nodes: tuple[NodeView, ...] = ()
    rule: Rule | None = None
    is_urgent: bool = False
    faults: frozenset[str] = frozenset()
    cohort: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        if self.node is not None:
            return "node"
        return "cell" if not self.nodes else "device" if "device" in self.evidence else "machine"


def find_suspicions(fleet: FleetView, slow: Iterable[SlowNode], settings: FaultSettings) -> tuple[Suspicion, ...]:
    """All suspicions, the most urgent first."""
    cells = (
        {member.node: cell for cell in fleet.cells.values() for member in cell.members}
        if _has_evidence(fleet, slow)
        else {}
    )
    suspicions = [
        *_by_signals(fleet, cells, settings),
        *_by_repairs(fleet, cells, settings),
        *_by_slowness(fleet, cells, slow),
    ]
    return tuple(suspicions)


def _has_evidence(fleet: FleetView, slow: Iterable[SlowNode]) -> bool:
    return bool(fleet.faults.signals or fleet.faults.repairs or tuple(slow))


def _by_signals(fleet: FleetView, cells: Mapping[str, CellView], settings: FaultSettings) -> Iterable[Suspicion]:
    """A grave fault (`ladder.is_grave`) accuses its node, or its machine. A signature that every rank of a cell reports
    accuses the node only in a cell of one. Otherwise a suspected member explains it, or it is held against the
    cell."""
    by_node: dict[str, list[SignalView]] = defaultdict(list)
    for signal in fleet.faults.signals:
        node = fleet.nodes.get(signal.node)
        if not signal.settled and node is not None and node.state in ACCUSABLE:
            by_node[signal.node].append(signal)
    vague: dict[str, list[SignalView]] = defaultdict(list)
    suspected: set[str] = set()
    soft: list[Suspicion] = []
    told: set[tuple[str, str]] = set()
    for suspicion in _faults_of_several(fleet, by_node, settings):
        suspected.update(node.id for node in suspicion.nodes if suspicion.rule is not None)
        told.update((node.id, signature) for node in suspicion.nodes for signature in suspicion.faults)
        yield suspicion
    for name in sorted(by_node):
        if name in suspected:
            continue
        node, cell = fleet.nodes[name], cells.get(name)
        alone = cell is None or len(cell.members) < 2
        hard = [
            s for s in by_node[name] if is_grave(s, settings) and (alone or s.signature not in UNATTRIBUTED_SIGNATURES)
        ]
        if hard:
            suspected.add(name)
            yield _node_suspicion(IncidentKind.HARDWARE, node, cell, hard, Rule.HARD_SIGNATURE)
            continue
        for signal in by_node[name]:
            if cell is not None and not alone and signal.signature in UNATTRIBUTED_SIGNATURES:
                vague[cell.id].append(signal)
        rest = [
            signal
            for signal in by_node[name]
            if (alone or signal.signature not in UNATTRIBUTED_SIGNATURES) and (name, signal.signature) not in told
        ]
        if rest:
            soft.append(_node_suspicion(IncidentKind.SOFT, node, cell, rest, None))
    yield from soft
    for cell_id in sorted(vague):
        cell = fleet.cells[cell_id]
        if not any(member.node in suspected for member in cell.members):
            yield _cell_suspicion(cell, vague[cell_id])


def _faults_of_several(
    fleet: FleetView, by_node: Mapping[str, list[SignalView]], settings: FaultSettings
) -> Iterable[Suspicion]:
    """Of machines with several nodes, and of devices that several nodes use. A fault of a machine explains the faults
    of its devices."""
    accused: set[str] = set()
    for suspicion in _faults_of_machines(fleet, by_node):
        if suspicion.rule is not None:
            accused.update(node.id for node in suspicion.nodes)
        yield suspicion
    shared: dict[tuple[str, str], list[SignalView]] = defaultdict(list)
    for name, signals in by_node.items():
        machine = fleet.nodes[name].machine
        for signal in signals if machine != name and name not in accused else ():
            if signal.device and signal.scope is FaultScope.DEVICE and signal.signature not in UNATTRIBUTED_SIGNATURES:
                shared[machine, signal.device].append(signal)
    for machine, device in sorted(shared):
        mine = shared[machine, device]
        users = {*fleet.faults.sharing.get((machine, device), ()), *(signal.node for signal in mine)}
        nodes = tuple(n for n in fleet.nodes_of(machine) if n.id in users and n.state in ACCUSABLE)
        if len(nodes) > 1:
            grave = [signal for signal in mine if is_grave(signal, settings)]
            kind = IncidentKind.HARDWARE if grave else IncidentKind.SOFT
            subject, who = f"{device} of {machine}", f"used by {', '.join(node.id for node in nodes)}"
            yield _suspicion_of_several(kind, subject, nodes, grave or mine, who, device=device)


def _faults_of_machines(fleet: FleetView, by_node: Mapping[str, list[SignalView]]) -> list[Suspicion]:
    """At most one of each machine with several nodes. A fault that its evidence attributes to a device counts as one of
    the machine if most of the nodes have it, unless all mean the same device: nodes share a driver, a power supply and
    a switch."""
    shared: dict[str, list[SignalView]] = defaultdict(list)
    for name, signals in by_node.items():
        if (machine := fleet.nodes[name].machine) != name:
            shared[machine] += signals
    found = []
    for machine in sorted(shared):
        nodes = tuple(n for n in fleet.nodes_of(machine) if n.state in ACCUSABLE)
        counts = Counter(signal.signature for signal in shared[machine])
        devices = {name: {s.device for s in shared[machine] if s.signature == name} for name in counts}
        common = {
            name
            for name, count in counts.items()
            if len(nodes) > 1 and 2 * count > len(nodes) and (len(devices[name]) > 1 or "" in devices[name])
        }
        mine = [s for s in shared[machine] if s.scope is FaultScope.MACHINE or s.signature in common]
        hard = [s for s in mine if is_hard(s.signature) and s.signature not in UNATTRIBUTED_SIGNATURES]
        soft = [s for s in mine if s.scope is FaultScope.MACHINE and s.signature not in UNATTRIBUTED_SIGNATURES]
        if hard or soft:
            kind = IncidentKind.MACHINE if hard else IncidentKind.SOFT
            who = f"seen by {len({signal.node for signal in hard or soft})} of its {len(nodes)} nodes"
            found.append(_suspicion_of_several(kind, machine, nodes, hard or soft, who))
    return found


def _suspicion_of_several(
    kind: IncidentKind, subject: str, nodes: tuple[NodeView, ...], signals: list[SignalView], who: str, **evidence: str
) -> Suspicion:
    signals = sorted(signals, key=lambda signal: (signal.first_at, signal.signature, signal.node))
    return Suspicion(
        kind=kind,
        subject=subject,
        reason=f"{signals[0].signature}: {signals[0].summary}; {who}",
        nodes=nodes,
        rule=None if kind is IncidentKind.SOFT else Rule.HARD_SIGNATURE,
        is_urgent=True,
        faults=frozenset(signal.signature for signal in signals),
        cohort=f"nodes of {nodes[0].instance_type}",
        evidence={
            **evidence,
            "nodes": [node.id for node in nodes],
            "signals": [_as_evidence(signal) for signal in signals],
        },
    )


def _node_suspicion(
    kind: IncidentKind, node: NodeView, cell: CellView | None, signals: list[SignalView], rule: Rule | None
) -> Suspicion:
    signals = sorted(signals, key=lambda signal: (signal.first_at, signal.signature))
    return Suspicion(
        kind=kind,
        subject=node.id,
        reason=f"{signals[0].signature}: {signals[0].summary}",
        node=node,
        cell=cell,
        nodes=(node,),
        rule=rule,
        is_urgent=True,
        faults=frozenset(signal.signature for signal in signals),
        cohort=f"nodes of {node.instance_type}",
        evidence={"signals": [_as_evidence(signal) for signal in signals]},
    )


def _cell_suspicion(cell: CellView, signals: list[SignalView]) -> Suspicion:
    ranks = {member.node: member.rank for member in cell.members}
    seen_by = sorted({f"rank {ranks[s.node]} on {s.node}" for s in signals if s.node in ranks})
    first = min(signals, key=lambda signal: signal.first_at)
    return Suspicion(
        kind=IncidentKind.UNATTRIBUTED,
        subject=cell.id,
        reason=f"{first.signature}: {first.summary}; any of its {len(cell.members)} nodes may be the broken one",
        cell=cell,
        faults=frozenset(signal.signature for signal in signals),
        evidence={"seen_by": seen_by, "signals": [_as_evidence(signal) for signal in signals]},
    )


def _by_repairs(fleet: FleetView, cells: Mapping[str, CellView], settings: FaultSettings) -> Iterable[Suspicion]:
    for name in sorted(fleet.faults.repairs):
        node, repairs = fleet.nodes.get(name), fleet.faults.repairs[name]
        if node is not None and node.state in ACCUSABLE and repairs >= settings.repairs_allowed:
            days = settings.repairs_window_s / 86400
            yield Suspicion(
                kind=IncidentKind.REPEATED_REPAIRS,
                subject=name,
                reason=f"repaired {repairs} times in {days:.0f} days; an operator must inspect it",
                node=node,
                cell=cells.get(name),
                nodes=(node,),
                rule=Rule.REPEATED_REPAIRS,
                evidence={"repairs": repairs},
            )


def _by_slowness(fleet: FleetView, cells: Mapping[str, CellView], slow: Iterable[SlowNode]) -> Iterable[Suspicion]:
    """Nodes of one machine whose driver lowers the clock of the same device are one suspicion."""
    by_part: dict[tuple[str, str], list[SlowNode]] = defaultdict(list)
    for one in slow:
        node = fleet.nodes[one.node]
        if node.state in ACCUSABLE:
            device = one.throttled[0].device if one.throttled and node.machine != node.id else ""
            by_part[node.machine if device else node.id, device].append(one)
    for (machine, device), found in by_part.items():
        first, nodes = found[0], tuple(fleet.nodes[one.node] for one in found)
        cell = cells.get(first.node)
        if not first.throttled and first.cohort.of_cells:
            if cell is not None:
                yield _slow_cell(cell, first, nodes[0])
            continue
        alone, names = len(nodes) == 1, [node.id for node in nodes]
        yield Suspicion(
            kind=IncidentKind.SLOW,
            subject=names[0] if alone else f"{device} of {machine}",
            reason=first.reason if alone else f"{first.reason}; used by {', '.join(names)}",
            node=nodes[0] if alone else None,
            cell=cell if alone else None,
            nodes=nodes,
            rule=Rule.SLOW,
            faults=frozenset({"slow"}),
            cohort=str(first.cohort),
            evidence=({} if alone else {"device": device, "nodes": names}) | _slow_evidence(first),
        )


def _slow_cell(cell: CellView, slow: SlowNode, leader: NodeView) -> Suspicion:
    """Of a cell whose ranks are not measured: nothing is replaced, and with several nodes any may be the slow one."""
    names = [member.node for member in cell.members]
    alone = len(names) == 1
    return Suspicion(
        kind=IncidentKind.SLOW,
        subject=leader.id if alone else cell.id,
        reason=slow.reason + ("" if alone else f"; any of its {len(names)} nodes may be the slow one"),
        node=leader if alone else None,
        cell=cell,
        nodes=(leader,) if alone else (),
        faults=frozenset({"slow"}),
        cohort=str(slow.cohort),
        evidence={"measured": "time between tokens of the cell", "members": names, **_slow_evidence(slow)},
    )


def _slow_evidence(slow_node: SlowNode) -> dict[str, Any]:
    return {
        "cohort": str(slow_node.cohort),
        "peers": len(slow_node.cohort_nodes) - 1,
        "windows": [{"window": m.index, "score": round(m.score, 3), "z": round(m.z, 1)} for m in slow_node.slow],
        "throttled": [
            {"window": t.index, "device": t.device, "clock_percent": round(100 * t.clock), "why": t.reason}
            for t in slow_node.throttled
        ],
    }


def _as_evidence(signal: SignalView) -> dict[str, Any]:
    return {
        "node": signal.node,
        "signature": signal.signature,
        "summary": signal.summary,
        "times": signal.count,
        "first": signal.first_at.isoformat(),
        "last": signal.last_at.isoformat(),
    }
