"""Decides whether faults of several machines have one cause: more than a third of what is alike has the same one.

Then what they share is at fault (a version, a driver, a switch, our own eyes), and no single machine is blamed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.planning.faults.fail_slow import SlowNode
from fleet.planning.placement.distance import common_prefix
from fleet.planning.settings import FaultSettings
from fleet.planning.snapshot import FleetView
from fleet.planning.states import CellState, NodeState

OUTSIDE = frozenset({NodeState.JOINING, NodeState.RETIRED})


@dataclass(frozen=True, slots=True)
class CommonCause:
    """`cohort`: what is alike, and with the fault the subject of its incident; `affected`: nodes, or cells where whole
    cells fail; `deployments` whose rollouts must halt; `place`: network nodes that all affected nodes share."""

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
    """Every common cause that can be seen now, in a stable order."""
    causes = [
        *_causes_in_signals(fleet, settings, now),
        *_causes_in_slow_nodes(fleet, slow, settings),
        *_causes_in_cells(fleet, settings),
    ]
    return tuple(sorted(causes, key=lambda cause: cause.subject))


def is_common(affected: int, size: int, settings: FaultSettings) -> bool:
    """Whether so many of a cohort of this size are no coincidence."""
    return affected >= settings.common_cause_nodes and affected > settings.common_cause_share * size


def _causes_in_signals(fleet: FleetView, settings: FaultSettings, now: datetime) -> Iterable[CommonCause]:
    """Settled signals count as well: a cause that condemns one machine after the other must be seen, too."""
    since = now - timedelta(seconds=settings.common_cause_window_s)
    affected: dict[tuple[str, str], set[str]] = defaultdict(set)
    for signal in fleet.faults.signals:
        if signal.last_at >= since:
            affected[signal.signature, signal.instance_type].add(signal.node)
    sizes = Counter(node.instance_type for node in fleet.nodes.values() if node.state not in OUTSIDE)
    for (signature, kind), nodes in affected.items():
        retired = sum(node not in fleet.nodes or fleet.nodes[node].state in OUTSIDE for node in nodes)
        if is_common(len(nodes), sizes[kind] + retired, settings):
            yield _cause_in_nodes(fleet, signature, f"nodes of {kind}", nodes, sizes[kind] + retired)


def _causes_in_slow_nodes(fleet: FleetView, slow: Iterable[SlowNode], settings: FaultSettings) -> Iterable[CommonCause]:
    cohorts: dict[str, list[SlowNode]] = defaultdict(list)
    for node in slow:
        cohorts[str(node.cohort)].append(node)
    for cohort, nodes in cohorts.items():
        size = len(nodes[0].cohort_nodes)
        if is_common(len(nodes), size, settings):
            yield _cause_in_nodes(fleet, "slow", cohort, [slow_node.node for slow_node in nodes], size)


def _cause_in_nodes(fleet: FleetView, fault: str, cohort: str, nodes: Iterable[str], size: int) -> CommonCause:
    names = tuple(sorted(nodes))
    here = [fleet.nodes[name].topology for name in names if name in fleet.nodes]
    return CommonCause(
        fault, cohort, names, size, _deployments_on(fleet, set(names)), common_prefix(here) if here else ()
    )


def _causes_in_cells(fleet: FleetView, settings: FaultSettings) -> Iterable[CommonCause]:
    """Cells that failed by themselves; those that lost a node say nothing of what they share."""
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
