"""What the planner of faults can decide. Each decision says why, and carries what it saw, so that a stale one can be
refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleet.planning.fault_rules import IncidentKind, Rule
from fleet.planning.states import NodeState


@dataclass(frozen=True, slots=True)
class CordonNode:
    """Keep a node out of new placements. What runs on it goes on."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class WishReplacement:
    """A node must be replaced, and its cell still serves: from now on the cell is drained first, even if what was wrong
    can no longer be seen while it drains."""

    node: str
    cell: str
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceNode:
    """Take a faulty node out of use at once: its cell is lost, and gets another node. `since`: when the state that was
    seen began; a node that left it and came back is left alone."""

    node: str
    seen: NodeState
    since: datetime
    cell: str
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True)
class CloseReplacement:
    """The work is done, or there is nothing left to do."""

    replacement: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """A fault that somebody or something must heal. `shadow`: its rule only says what it would have done. `cohort`
    names what is alike in the machines it may be compared with."""

    kind: IncidentKind
    subject: str
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    region: str = ""
    deployment: str = ""
    cell: str = ""
    node: str = ""
    cohort: str = ""
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class NoteIncident:
    """An open incident's fault is still there, and this is what is known of it now."""

    incident: int
    summary: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CloseIncident:
    """The fault is gone. `seen_at`: when it was last there; a fault that came back meanwhile keeps its incident."""

    incident: int
    seen_at: datetime
    reason: str
