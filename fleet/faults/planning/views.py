"""Fault rules, their modes, and faults as planners see them: frozen plain data, a part of
`fleet.reconcile.planning.snapshot.FleetView`. Decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from engine_agent.protocol.signatures import FaultScope
from fleet.reconcile.planning.states import NoticeKind


class Rule(StrEnum):
    """Reasons for a replacement. `operator` is an operator's request and cannot be switched off; the others are
    automatic."""

    HARD_SIGNATURE = "hard_signature"
    SILENCE = "silence"
    SLOW = "slow"
    REPEATED_REPAIRS = "repeated_repairs"
    NOTICE = "notice"
    OPERATOR = "operator"


class RuleMode(StrEnum):
    """`shadow` records what the rule would have done and changes nothing. New rules start in it."""

    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


SETTABLE_RULES = tuple(rule for rule in Rule if rule is not Rule.OPERATOR)


class IncidentKind(StrEnum):
    """Incidents that the planner of faults opens and closes."""

    HARDWARE = "hardware-fault"
    MACHINE = "machine-fault"
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


NODE_LOST = "node-lost"
OF_CELLS = frozenset({"cell-failed", "cell-lost"})
EXPLAINS_CELLS = frozenset(
    {
        NODE_LOST,
        IncidentKind.HARDWARE,
        IncidentKind.MACHINE,
        IncidentKind.UNATTRIBUTED,
        IncidentKind.SOFT,
        IncidentKind.WITNESSED,
        IncidentKind.UNREACHABLE,
    }
)
"""Incidents about nodes that include the failure of these nodes' cells."""
CLOSED_BY_PARTS = frozenset({NODE_LOST, *OF_CELLS})
"""Incidents that close when all of their nodes and cells have recovered. The planner closes the others."""
EXPLAINED_WITHIN_S = 180.0
"""A cell fails at its first error; its silent node is lost up to `FaultSettings.unreachable_after_s` (120 s) later."""


class PartNoun(StrEnum):
    NODE = "node"
    CELL = "cell"


class Rung(StrEnum):
    """Steps of a repair, the gentlest first."""

    RESTART = "restart_engine"
    RESET = "reset_device"
    REBOOT = "reboot_machine"
    REPLACE = "replace_machine"

    @property
    def noun(self) -> str:
        return _NOUNS[self]


_NOUNS = {
    Rung.RESTART: "restart of its engine",
    Rung.RESET: "reset of its device",
    Rung.REBOOT: "reboot of its machine",
    Rung.REPLACE: "replacement",
}

NO_USABLE_CELL = "no-usable-cell"
"""Incident of a deployment that no cell of a region can serve (`traffic.region_shares.planning.load`). Its subject is
`DEPLOYMENT@REGION`."""
REGION_LOST = "region-lost"
"""Incident of a region in which no deployment can be served. Its subject is the region."""
NEEDS_OPERATOR = frozenset({IncidentKind.REPEATED_REPAIRS})
"""While such an incident is open, its node stays out of every cell: an operator must inspect the machine."""


@dataclass(frozen=True, slots=True)
class SignalView:
    """A hardware fault that an agent saw once or more. `settled`: it was acted on or dismissed, and counts only towards
    a common cause. `detail`: the XID, recovery action or check; `device`: UUID, or as `neuron 3`; both may be empty."""

    node: str
    signature: str
    summary: str
    instance_type: str
    first_at: datetime
    last_at: datetime
    count: int = 1
    cell: str = ""
    settled: bool = False
    scope: FaultScope = FaultScope.DEVICE
    detail: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class IncidentView:
    """An open incident. `seen_at`: when its fault was last seen. `is_held`: a cell that it hit has not recovered."""

    id: int
    kind: str
    subject: str
    opened_at: datetime
    seen_at: datetime
    summary: str = ""
    node: str = ""
    cell: str = ""
    shadow: bool = False
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ReplacementView:
    """A replacement of a faulty node. `begun`: the node is out of use. Before that, its cell still serves and must be
    drained."""

    id: int
    node: str
    rule: Rule
    region: str
    instance_type: str
    cell: str = ""
    begun: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to repair a node that is out of use. `request`: its deep checks, or "" before they were ordered.
    `checks`: their results when they have ended, each a name, whether it passed (None: it could not run), and what was
    found. `result`: of an ended attempt."""

    id: int
    node: str
    rung: Rung
    reason: str
    at: datetime
    request: str = ""
    checks: tuple[tuple[str, bool | None, str], ...] | None = None
    ended_at: datetime | None = None
    cured: bool = False
    result: str = ""


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """The clock of a device in one window while it was in use. `clock`: its average as a share of the maximum;
    `reasons`: those of `SLOW_CLOCK_REASONS` with their shares of the time."""

    clock: float
    reasons: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Measurements of one rank in one window of `FaultSettings.step_window_s`. `index` counts windows since 1970.
    `steps` and `compute_ms` map a bucket of batch sizes (`engine_agent.protocol.metrics`) to its sums. `devices`: by
    name, as `nvidia 3`. `of_cell`: its steps are those of the whole cell, as the proxy of its leader saw them."""

    index: int
    cell: str
    generation: int
    steps: Mapping[int, int]
    compute_ms: Mapping[int, float]
    devices: Mapping[str, DeviceWindow] = field(default_factory=dict)
    of_cell: bool = False


@dataclass(frozen=True, slots=True)
class NoticeView:
    """A provider's notice about a node, issued at `at`. `ends_at`: when the machine ends, if known."""

    node: str
    kind: NoticeKind
    at: datetime
    ends_at: datetime | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class FaultsView:
    """`sharing`: (machine, device of a signal) -> nodes that use the device, if there are several; `may_reboot`: nodes
    on joined hosts whose operators allow reboots; `repairs`: node -> number in `FaultSettings.repairs_window_s`;
    `down`: cell -> an ingress that cannot reach it; `windows`: node -> its recent ones, oldest first; `muted`: (kind,
    subject) that an operator dismissed recently; `attempts`: node -> its repairs by reset or reboot in
    `FaultSettings.repairs_window_s`, oldest first."""

    signals: tuple[SignalView, ...] = ()
    incidents: tuple[IncidentView, ...] = ()
    replacements: tuple[ReplacementView, ...] = ()
    repairs: Mapping[str, int] = field(default_factory=dict)
    modes: Mapping[Rule, RuleMode] = field(default_factory=dict)
    down: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, tuple[StepWindow, ...]] = field(default_factory=dict)
    muted: frozenset[tuple[str, str]] = frozenset()
    attempts: Mapping[str, tuple[Attempt, ...]] = field(default_factory=dict)
    sharing: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    may_reboot: frozenset[str] = frozenset()

    def mode(self, rule: Rule) -> RuleMode:
        """On, unless another mode was set."""
        return self.modes.get(rule, RuleMode.ON)

    def is_held(self, node: str, kinds: frozenset[str]) -> bool:
        """Whether an open incident of these kinds is about this node."""
        return any(incident.node == node and incident.kind in kinds for incident in self.incidents)
