"""Decides which nodes are suspected, of what, and with which evidence. What follows is decided in `planner`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_agent.protocol.signatures import UNATTRIBUTED_SIGNATURES, is_hard
from fleet.planning.fault_rules import IncidentKind, Rule
from fleet.planning.fault_views import SignalView
from fleet.planning.faults.fail_slow import SlowNode
from fleet.planning.settings import FaultSettings
from fleet.planning.snapshot import CellView, FleetView, NodeView
from fleet.planning.states import NodeState

ACCUSABLE = frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.FAULTY})


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A reason to have an incident about a node or cell. `rule` None: nothing follows from it. `at_once`: its cell must
    not serve any longer; else the cell is drained first. `faults`, `cohort`: the common cause it may be part of."""

    kind: IncidentKind
    subject: str
    reason: str
    node: NodeView | None = None
    cell: CellView | None = None
    rule: Rule | None = None
    at_once: bool = False
    faults: frozenset[str] = frozenset()
    cohort: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def find_suspicions(fleet: FleetView, slow: Iterable[SlowNode], settings: FaultSettings) -> tuple[Suspicion, ...]:
    """Every suspicion, the most urgent first."""
    cells = {member.node: cell for cell in fleet.cells.values() for member in cell.members} if _any(fleet, slow) else {}
    suspicions = [
        *_by_signals(fleet, cells),
        *_by_repairs(fleet, cells, settings),
        *_by_slowness(fleet, cells, slow),
    ]
    return tuple(suspicions)


def _any(fleet: FleetView, slow: Iterable[SlowNode]) -> bool:
    return bool(fleet.faults.signals or fleet.faults.repairs or tuple(slow))


def _by_signals(fleet: FleetView, cells: Mapping[str, CellView]) -> Iterable[Suspicion]:
    """Hard ones accuse their node. What every rank sees of one broken rank accuses the node only where it is alone; or
    it is explained by a mate that is suspected, and else it is the cell's."""
    by_node: dict[str, list[SignalView]] = defaultdict(list)
    for signal in fleet.faults.signals:
        node = fleet.nodes.get(signal.node)
        if not signal.settled and node is not None and node.state in ACCUSABLE:
            by_node[signal.node].append(signal)
    vague: dict[str, list[SignalView]] = defaultdict(list)
    suspected: set[str] = set()
    soft: list[Suspicion] = []
    for name in sorted(by_node):
        node, cell = fleet.nodes[name], cells.get(name)
        alone = cell is None or len(cell.members) < 2
        hard = [
            s for s in by_node[name] if is_hard(s.signature) and (alone or s.signature not in UNATTRIBUTED_SIGNATURES)
        ]
        if hard:
            suspected.add(name)
            yield _node_suspicion(IncidentKind.HARDWARE, node, cell, hard, Rule.HARD_SIGNATURE)
            continue
        for signal in by_node[name]:
            if cell is not None and not alone and signal.signature in UNATTRIBUTED_SIGNATURES:
                vague[cell.id].append(signal)
        rest = [signal for signal in by_node[name] if alone or signal.signature not in UNATTRIBUTED_SIGNATURES]
        if rest:
            soft.append(_node_suspicion(IncidentKind.SOFT, node, cell, rest, None))
    yield from soft
    for cell_id in sorted(vague):
        cell = fleet.cells[cell_id]
        if not any(member.node in suspected for member in cell.members):
            yield _cell_suspicion(cell, vague[cell_id])


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
        rule=rule,
        at_once=True,
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
                reason=f"repaired {repairs} times in {days:.0f} days; a person must look at it before it serves again",
                node=node,
                cell=cells.get(name),
                rule=Rule.REPEATED_REPAIRS,
                evidence={"repairs": repairs},
            )


def _by_slowness(fleet: FleetView, cells: Mapping[str, CellView], slow: Iterable[SlowNode]) -> Iterable[Suspicion]:
    for slow_node in slow:
        node = fleet.nodes[slow_node.node]
        if node.state in ACCUSABLE:
            yield Suspicion(
                kind=IncidentKind.SLOW,
                subject=slow_node.node,
                reason=slow_node.reason,
                node=node,
                cell=cells.get(slow_node.node),
                rule=Rule.SLOW,
                faults=frozenset({"slow"}),
                cohort=str(slow_node.cohort),
                evidence={
                    "cohort": str(slow_node.cohort),
                    "peers": len(slow_node.cohort_nodes) - 1,
                    "windows": [
                        {"window": m.index, "score": round(m.score, 3), "z": round(m.z, 1)} for m in slow_node.slow
                    ],
                },
            )


def _as_evidence(signal: SignalView) -> dict[str, Any]:
    return {
        "node": signal.node,
        "signature": signal.signature,
        "summary": signal.summary,
        "times": signal.count,
        "first": signal.first_at.isoformat(),
        "last": signal.last_at.isoformat(),
    }
