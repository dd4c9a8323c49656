"""The rules by which faults are judged, and whether each is in force. Declared once; decides nothing.

Faults as planners see them: what agents saw, what is being healed, and what providers announced. Frozen plain data,
a part of `fleet.reconcile.planning.snapshot.FleetView`. Decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from fleet.reconcile.planning.states import NoticeKind


class Rule(StrEnum):
    """What may lead to a replacement. `operator`: requested by an operator, and no setting stops that; the others are
    automatic."""

    HARD_SIGNATURE = "hard_signature"
    SILENCE = "silence"
    SLOW = "slow"
    REPEATED_REPAIRS = "repeated_repairs"
    NOTICE = "notice"
    OPERATOR = "operator"


class RuleMode(StrEnum):
    """Shadow: record what the rule would have done, and touch nothing. A new rule begins so."""

    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


SETTABLE_RULES = tuple(rule for rule in Rule if rule is not Rule.OPERATOR)


class IncidentKind(StrEnum):
    """Incidents that the planner of faults opens and closes."""

    HARDWARE = "hardware-fault"
    UNATTRIBUTED = "collectives-fault"
    SOFT = "hardware-warning"
    SLOW = "node-slow"
    REPEATED_REPAIRS = "repeated-repairs"
    COMMON_CAUSE = "common-cause"
    FROZEN = "repairs-frozen"
    ALL_SILENT = "all-agents-silent"
    WITNESSED = "silent-node"
    UNREACHABLE = "agent-unreachable"
    CLOUD_NOTICE = "cloud-notice"


NO_USABLE_CELL = "no-usable-cell"
"""Kind of the incident of a deployment that no cell of a region can serve (`traffic.region_shares.planning.load`);
its subject is
`DEPLOYMENT@REGION`."""
NEEDS_OPERATOR = frozenset({IncidentKind.REPEATED_REPAIRS})
"""While such an incident is open its node stays as it is, out of every cell: an operator must inspect the machine."""


@dataclass(frozen=True, slots=True)
class SignalView:
    """What an agent saw in its hardware, once or many times. `settled`: acted upon or dismissed; it then counts only
    towards a common cause."""

    node: str
    signature: str
    summary: str
    instance_type: str
    first_at: datetime
    last_at: datetime
    count: int = 1
    cell: str = ""
    settled: bool = False


@dataclass(frozen=True, slots=True)
class IncidentView:
    """An open incident. `seen_at`: when its fault was last there."""

    id: int
    kind: str
    subject: str
    opened_at: datetime
    seen_at: datetime
    summary: str = ""
    node: str = ""
    cell: str = ""
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class ReplacementView:
    """The work that heals a node's fault. `begun`: the node is out of use; before that its cell still serves, and must
    be drained first."""

    id: int
    node: str
    rule: Rule
    region: str
    instance_type: str
    cell: str = ""
    begun: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """What one rank computed in one window of `FaultSettings.step_window_s`; `index` counts them since 1970.

    `steps` and `compute_ms` map a bucket of batch sizes (`engine_agent.protocol.metrics`) to its sums.
    """

    index: int
    cell: str
    generation: int
    steps: Mapping[int, int]
    compute_ms: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class NoticeView:
    """What a node's provider announced at `at`. `ends_at`: when it will end the machine; None: it did not say."""

    node: str
    kind: NoticeKind
    at: datetime
    ends_at: datetime | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class FaultsView:
    """`repairs` counts a node's in `FaultSettings.repairs_window_s`; `down` maps a cell to an ingress that cannot reach
    it; `windows` holds a node's last ones, oldest first; `muted`: (kind, subject) that an operator dismissed lately."""

    signals: tuple[SignalView, ...] = ()
    incidents: tuple[IncidentView, ...] = ()
    replacements: tuple[ReplacementView, ...] = ()
    repairs: Mapping[str, int] = field(default_factory=dict)
    modes: Mapping[Rule, RuleMode] = field(default_factory=dict)
    down: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, tuple[StepWindow, ...]] = field(default_factory=dict)
    muted: frozenset[tuple[str, str]] = frozenset()

    def mode(self, rule: Rule) -> RuleMode:
        """In force unless it was set otherwise."""
        return self.modes.get(rule, RuleMode.ON)

    def is_held(self, node: str, kinds: frozenset[str]) -> bool:
        """Whether an open incident of these kinds speaks of this node."""
        return any(incident.node == node and incident.kind in kinds for incident in self.incidents)
