"""Decides which nodes and cells are suspected, of what and with which evidence: hard signatures, repeated repairs, slow
nodes, and faults with a common cause. It never blames a single machine for a fault that more than a third of a cohort
shares: then a version, a driver or a switch is at fault. `planner` decides what follows.

A cell runs in lock-step, so one slow node slows all of its members. Only a rank's own computing time, without waiting,
tells them apart. It is compared per batch size with its cohort: the same role in cells of the same version on the same
machines. A node without a cohort is never slow."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from engine_agent.protocol.signatures import UNATTRIBUTED_SIGNATURES, is_hard
from engine_agent.protocol.states import CellRole, MemberRole
from fleet.faults.planning.views import IncidentKind, Rule, SignalView, StepWindow
from fleet.placement.planning.distance import common_prefix
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import CellState, NodeState

MAD_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution is its standard deviation divided by this."""


@dataclass(frozen=True, slots=True, order=True)
class Cohort:
    """Nodes that may be compared with each other."""

    version: str
    instance_type: str
    role: MemberRole
    cell_role: CellRole = CellRole.MIXED

    def __str__(self) -> str:
        cells = "" if self.cell_role is CellRole.MIXED else f" {self.cell_role} cells"
        return f"{self.role}s of {self.version}{cells} on {self.instance_type}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One node in one window. `score`: its speed relative to the cohort's median; `z`: its robust z-score."""

    index: int
    score: float
    z: float


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node slower than its cohort, and the windows that show it."""

    node: str
    cohort: Cohort
    cohort_nodes: tuple[str, ...]
    slow: tuple[Measured, ...]
    windows: int

    @property
    def reason(self) -> str:
        worst = min(self.slow, key=lambda node: node.score)
        return (
            f"slower than its cohort in {len(self.slow)} of {self.windows} windows: score {worst.score:.2f}, "
            f"robust z {worst.z:.1f}, {len(self.cohort_nodes) - 1} peers"
        )


Windows = dict[str, tuple[StepWindow, ...]]
"""Node -> its windows, oldest first."""

_compared: dict[Cohort, tuple[Windows, FaultSettings, tuple[SlowNode, ...]]] = {}
"""Results per cohort, because windows end every 30 s and passes run every second."""


def find_slow(fleet: FleetView, settings: FaultSettings) -> tuple[SlowNode, ...]:
    """Nodes that are slow in enough of the recent windows, sorted by ID."""
    cohorts = _cohorts(fleet)
    for gone in [cohort for cohort in _compared if cohort not in cohorts]:
        _compared.pop(gone, None)
    slow_nodes = [slow for cohort, nodes in sorted(cohorts.items()) for slow in _found_in(cohort, nodes, settings)]
    return tuple(sorted(slow_nodes, key=lambda slow: slow.node))


def _found_in(cohort: Cohort, nodes: Windows, settings: FaultSettings) -> tuple[SlowNode, ...]:
    """Compares again only if the windows or settings changed."""
    last = _compared.get(cohort)
    if last is None or last[:2] != (nodes, settings):
        by_index = {node: {window.index: window for window in known} for node, known in nodes.items()}
        last = _compared[cohort] = (nodes, settings, tuple(_slow_in(cohort, by_index, settings)))
    return last[2]


def relative_times(windows: Mapping[str, StepWindow], settings: FaultSettings) -> dict[str, float]:
    """Node -> its step time relative to the cohort's median at the same batch sizes, weighted by its own steps. A batch
    size counts if the node and at least `slow_peers` others ran it `slow_steps` times."""
    means: dict[int, dict[str, float]] = defaultdict(dict)
    for node, window in windows.items():
        for bucket, steps in window.steps.items():
            if steps >= settings.slow_steps:
                means[bucket][node] = window.compute_ms.get(bucket, 0.0) / steps
    usual = {bucket: median(known.values()) for bucket, known in means.items() if len(known) > settings.slow_peers}
    weighted: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for bucket, typical_ms in usual.items():
        for node, mean_ms in means[bucket].items():
            if typical_ms > 0:
                weighted[node].append((windows[node].steps[bucket], mean_ms / typical_ms))
    return {
        node: sum(steps * time for steps, time in parts) / sum(steps for steps, _ in parts)
        for node, parts in weighted.items()
    }


def measure(index: int, times: Mapping[str, float], settings: FaultSettings) -> dict[str, Measured]:
    """Score and robust z of every node of a cohort in one window."""
    usual = median(times.values())
    spread = median(abs(time - usual) for time in times.values())
    sigma = MAD_TO_SIGMA * max(spread, settings.slow_mad_share * usual)
    return {
        node: Measured(index, usual / time if time > 0 else 1.0, (time - usual) / sigma if sigma > 0 else 0.0)
        for node, time in times.items()
    }


def _slow_in(
    cohort: Cohort, nodes: Mapping[str, Mapping[int, StepWindow]], settings: FaultSettings
) -> Iterable[SlowNode]:
    newest = max(index for windows in nodes.values() for index in windows)
    slow: dict[str, list[Measured]] = defaultdict(list)
    for left in range(settings.step_windows, 0, -1):
        if max((len(slow_windows) for slow_windows in slow.values()), default=0) + left < settings.step_windows_slow:
            break  # no node can become slow enough: the usual case, and half the work
        index = newest - left + 1
        times = relative_times({node: known[index] for node, known in nodes.items() if index in known}, settings)
        if len(times) <= settings.slow_peers:
            continue
        for node, measured in measure(index, times, settings).items():
            if measured.score < settings.slow_score and measured.z > settings.slow_z:
                slow[node].append(measured)
    names = tuple(sorted(nodes))
    return (
        SlowNode(node, cohort, names, tuple(slow_windows), settings.step_windows)
        for node, slow_windows in slow.items()
        if len(slow_windows) >= settings.step_windows_slow
    )


def _cohorts(fleet: FleetView) -> dict[Cohort, Windows]:
    cohorts: dict[Cohort, Windows] = defaultdict(dict)
    if not fleet.faults.windows:
        return cohorts
    for cell in fleet.cells.values():
        for member in cell.members:
            known = fleet.faults.windows.get(member.node, ())
            mine = tuple(w for w in known if (w.cell, w.generation) == (cell.id, cell.generation))
            if mine:
                role = MemberRole.FOLLOWER if member.rank else MemberRole.LEADER
                version = cell.version or fleet.deployments[cell.deployment].version
                cohort = Cohort(version, fleet.nodes[member.node].instance_type, role, cell.role)
                cohorts[cohort][member.node] = mine
    return cohorts


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
    """A reason for an incident about a node or cell. Nothing is replaced if `rule` is None. `is_urgent`: the cell must
    stop serving now; otherwise it is drained first. `faults`, `cohort`: the common cause that it may be part of."""

    kind: IncidentKind
    subject: str
    reason: str
    node: NodeView | None = None
    cell: CellView | None = None
    rule: Rule | None = None
    is_urgent: bool = False
    faults: frozenset[str] = frozenset()
    cohort: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


def find_suspicions(fleet: FleetView, slow: Iterable[SlowNode], settings: FaultSettings) -> tuple[Suspicion, ...]:
    """All suspicions, the most urgent first."""
    cells = (
        {member.node: cell for cell in fleet.cells.values() for member in cell.members}
        if _has_evidence(fleet, slow)
        else {}
    )
    suspicions = [
        *_by_signals(fleet, cells),
        *_by_repairs(fleet, cells, settings),
        *_by_slowness(fleet, cells, slow),
    ]
    return tuple(suspicions)


def _has_evidence(fleet: FleetView, slow: Iterable[SlowNode]) -> bool:
    return bool(fleet.faults.signals or fleet.faults.repairs or tuple(slow))


def _by_signals(fleet: FleetView, cells: Mapping[str, CellView]) -> Iterable[Suspicion]:
    """A hard signature accuses its node. A signature that every rank of a cell reports accuses the node only in a cell
    of one. Otherwise a suspected member explains it, or it is held against the cell."""
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
