"""The disruption ledger: whether one more cell may be taken down on purpose, by the same rule for every cause.

Pure. Planners ask it of a snapshot; services ask the same function again of the rows that they hold locked. A cell is
available once it has been ready for `min_healthy_s` of its deployment's policy.

Times and limits of the reconciler, each with its source.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from fleet.autoscaling.planning.role_split import answers
from fleet.deployments.planner import ShareSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView
from fleet.reconcile.planning.states import CellState, DisruptionCause


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """How many cells of all deployments together may be down on purpose: a share of those wanted, or the floor.

    A tenth is what LWS and ECS users commonly allow one service; the floors let two small deployments move at once.
    """

    region_share: float = 0.10
    region_floor: int = 2
    fleet_share: float = 0.10
    fleet_floor: int = 4

    def region(self, wanted: int) -> int:
        return max(self.region_floor, int(self.region_share * wanted))

    def fleet(self, wanted: int) -> int:
        return max(self.fleet_floor, int(self.fleet_share * wanted))


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """What one more disruption starts from, in cells. `open`: down on purpose.

    The first three count the deployment, `…_here` its cells in the cell's region, `region_…` and `fleet_…` all
    deployments and no disruptions for scaling. `is_available`: the cell itself is one of the available.
    `available_prefill`: those of the available that answer nobody; `is_prefill`: the cell itself is such.
    """

    wanted: int
    available: int
    open: int
    wanted_here: int
    available_here: int
    region_wanted: int
    region_open: int
    fleet_wanted: int
    fleet_open: int
    is_available: bool
    available_prefill: int = 0
    is_prefill: bool = False


def refusal(counts: LedgerCounts, cause: DisruptionCause, max_unavailable: int, limits: LedgerLimits) -> str | None:
    """Why this cell may not be taken down now; None: it may (I1, I10).

    What makes room for others goes at the pace of its policy, and counts against the budgets even where no cell is
    missing by it: many deployments may have to make room at once.
    """
    left = counts.available - counts.is_available
    left_here = counts.available_here - counts.is_available
    answering = left - counts.available_prefill + (counts.is_available and counts.is_prefill)
    if counts.wanted > 0 and answering < 1:
        return "no other cell of the deployment is available" + (", but for such that read prompts" if left else "")
    short, short_here = counts.wanted - left, counts.wanted_here - left_here
    if min(counts.open + 1, short) > max_unavailable:
        return f"{counts.open} cells of the deployment are down on purpose, at most {max_unavailable} may be"
    makes_room = cause is DisruptionCause.PREEMPTION
    if makes_room and counts.open >= max(1, max_unavailable):
        return f"{counts.open} cells of the deployment are down on purpose, and make room one by one"
    if short_here > (0 if makes_room or cause is DisruptionCause.SCALE else max_unavailable):
        return f"{counts.available_here} of {counts.wanted_here} cells in the region are available"
    is_budgeted = short_here > 0 or makes_room
    if is_budgeted and counts.region_open >= limits.region(counts.region_wanted):
        return f"{counts.region_open} cells of the region are down on purpose, which is its budget"
    if is_budgeted and counts.fleet_open >= limits.fleet(counts.fleet_wanted):
        return f"{counts.fleet_open} cells of the fleet are down on purpose, which is its budget"
    return None


class Ledger:
    """The ledger of one pass: what the snapshot says, and what this pass has charged on top."""

    def __init__(self, fleet: FleetView, limits: LedgerLimits, now: datetime) -> None:
        self._fleet = fleet
        self._limits = limits
        self._available: set[str] = {cell.id for cell in fleet.cells.values() if self._counts(cell, now)}
        self._ready_here: Counter[tuple[str, str]] = Counter()
        self._ready: Counter[str] = Counter()
        self._ready_prefill: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._region_open: Counter[str] = Counter()
        for cell in fleet.cells.values():
            self._add_available(cell, int(cell.id in self._available))
            if cell.disruption is not None:
                self._add_open(cell, cell.disruption)
        self._region_wanted: Counter[str] = Counter()
        for deployment in fleet.deployments.values():
            self._region_wanted.update(deployment.cells_wanted)

    def refusal(self, cell: CellView, cause: DisruptionCause) -> str | None:
        """Why a ready cell may not be taken down now."""
        deployment = self._fleet.deployments[cell.deployment]
        counts = LedgerCounts(
            wanted=sum(deployment.cells_wanted.values()),
            available=self._ready[cell.deployment],
            open=self._open[cell.deployment],
            wanted_here=deployment.cells_wanted.get(cell.region, 0),
            available_here=self._ready_here[cell.deployment, cell.region],
            region_wanted=self._region_wanted[cell.region],
            region_open=self._region_open[cell.region],
            fleet_wanted=self._region_wanted.total(),
            fleet_open=self._region_open.total(),
            is_available=cell.id in self._available,
            available_prefill=self._ready_prefill[cell.deployment],
            is_prefill=not answers(cell.role),
        )
        return refusal(counts, cause, self._fleet.policy_of(cell.deployment).max_unavailable, self._limits)

    def charge(self, cell: CellView, cause: DisruptionCause) -> None:
        """This cell is taken down by this pass."""
        self._add_available(cell, -int(cell.id in self._available))
        self._available.discard(cell.id)
        self._add_open(cell, cause)

    def is_available(self, cell: CellView) -> bool:
        return cell.id in self._available

    def _counts(self, cell: CellView, now: datetime) -> bool:
        settle_s = self._fleet.policy_of(cell.deployment).min_healthy_s
        return cell.state is CellState.READY and (now - cell.state_since).total_seconds() >= settle_s

    def _add_available(self, cell: CellView, number: int) -> None:
        self._ready_here[cell.deployment, cell.region] += number
        self._ready[cell.deployment] += number
        self._ready_prefill[cell.deployment] += 0 if answers(cell.role) else number

    def _add_open(self, cell: CellView, cause: DisruptionCause) -> None:
        self._open[cell.deployment] += 1
        if cause is not DisruptionCause.SCALE:
            self._region_open[cell.region] += 1


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """Seconds unless the name says otherwise; `_share` is a fraction of 1."""

    replaced_share: float = 0.05
    """Of a pool may be under replacement at a time, and one node in any case (design.md, faults)."""
    frozen_above_share: float = 0.20
    """Of a pool or zone unhealthy: then something else is wrong than single nodes. NVSentinel's breaker takes 50 %."""
    frozen_above_nodes: int = 2
    """So many unhealthy nodes freeze nothing: in a pool of five the share would stop the second repair."""
    common_cause_share: float = 1 / 3
    """Of a cohort with the same fault: it is what they share that is at fault (design.md, faults)."""
    common_cause_nodes: int = 3
    """Fewer are a coincidence, in however small a cohort."""
    common_cause_window_s: float = 600.0
    """How far apart faults of one cause may be seen; a rollout's bake is as long."""
    repairs_allowed: int = 5
    """In `repairs_window_s` on one node; then an operator must inspect it (design.md, faults)."""
    repairs_window_s: float = 7 * 86400.0
    close_after_s: float = 60.0
    """How long a fault must be gone before its incident closes, so that one that comes and goes stays one incident."""
    muted_s: float = 3600.0
    """How long a dismissed incident stays quiet while there is no new evidence; an operator may look again by then."""
    note_every_s: float = 15.0
    """How often an open incident records that its fault is still there; well below `close_after_s`."""
    witness_age_s: float = 10.0
    """How old the report of an ingress may be: it reports every 2 s, and is suspect after this long like any agent."""
    step_window_s: float = 30.0
    """Length of a window of step times: 600 to 1500 decode steps of a 70B model, enough for a steady mean."""
    step_windows: int = 5
    step_windows_slow: int = 3
    """Of `step_windows` in a row: one stall of a few seconds is no slow node (design.md, faults)."""
    slow_score: float = 0.7
    """Median step time of the cohort, divided by the node's own (design.md, faults)."""
    slow_z: float = 3.5
    """Robust z-score beyond which a value is an outlier: Iglewicz and Hoaglin (1993), and design.md."""
    slow_peers: int = 5
    """Fewer peers are no cohort (design.md, faults)."""
    slow_mad_share: float = 0.02
    """Least spread that a cohort is taken to have, of its median: identical machines differ by about this much."""
    slow_steps: int = 20
    """Steps at a batch size, below which their mean says nothing."""


@dataclass(frozen=True, slots=True)
class NoticeSettings:
    """What providers announce of machines. Seconds unless the name says otherwise; `_share` is a fraction of 1."""

    block_lead_s: float = 1800.0
    """Before the machines of a Capacity Block end, which EC2 begins with half an hour before the block's own end:
    Karpenter begins 40 minutes before that one, we an hour."""
    last_s: float = 10.0
    """Before the end of its machine a drain is over, so that what is left is told, and not cut off."""
    margin_s: float = 30.0
    """For passes, tables and agents, when a drain must be over by a certain time."""
    taken_up_s: float = 5.0
    """Until ingresses send requests to a cell that has become ready: a pass, a table and a check, 2 s or so."""
    impaired_after_s: float = 300.0
    """How long a provider's checks may fail before an operator is told: EC2's own alarms take two to five minutes."""
    zone_share: float = 1 / 3
    """Of a zone impaired: then it is the zone that is in trouble (as `FaultSettings.common_cause_share`)."""
    zone_nodes: int = 3


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Seconds unless the name says otherwise."""

    doubt_after_s: float = 3.0
    """Silence after which the provider is queried: one missed report (every 2 s ± 10 %) and some."""
    described_for_s: float = 15.0
    """How long what a provider said of a machine in doubt counts; it is asked again every second or so."""
    agent_restart_after_s: float = 1.0
    """Wait after a connection closed before its agent is started again: the machine may be dying, not the agent."""
    suspect_after_s: float = 10.0
    """Five reports missed; Nomad's heartbeat TTL is the same."""
    lost_after_s: float = 30.0
    """Silence that, with a second witness, makes a node lost. Kubernetes takes 40 s."""
    unreachable_after_s: float = 120.0
    """Silence that nobody confirms, after which an operator is told, and what serves nothing is given up: a restart of
    agent and machine take less."""
    back_within_s: float = 60.0
    """How long agents may take until all are connected again, after a cut or a restart of the control plane. Whoever
    came back a shorter time ago is no witness against one that is still away."""
    heard_after_cut_s: float = 10.0
    """How long after that a node must have been heard, so that its silence is not of the same cut: as long as makes it
    suspect, and five reports."""
    unhealthy_after_s: float = 10.0
    """How long a ready cell may fail its probes before it is failed; the ingress has left it long before."""
    start_grace_s: float = 30.0
    """Beyond the version's own ready timeout, for an agent that never reports."""
    load_age_s: float = 1.5
    """How old the load in a report may be when it comes: the agent polls every 0.2 s and waits 1 s for a response."""
    restart_backoff_s: float = 2.0
    """First wait before a failed cell starts again; doubles with each start that did not become ready."""
    restart_backoff_max_s: float = 300.0
    explanations_per_pass: int = 20
    """Cells that get a new reason for waiting; each is a row in the timeline, and the first ones matter most."""
    surplus_after_s: float = 300.0
    """How long a spare beyond the wanted number stays before it is given back."""
    failed_launch_kept_s: float = 30.0
    """Wait between two launches in place of a machine that never joined."""
    misfits_kept: int = 4
    """Idle spares that fit no waiting cell beyond which no nearer ones are bought in hope: providers may not listen."""
    launches_per_pass: int = 8
    """Bound on the machines that one pass asks a provider for, so that a wrong number cannot buy a thousand. One cell's
    machines are asked for together, however many."""
    unneeded_order_kept_s: float = 10.0
    """How long an order for a machine that nobody needs any more stays: needs come back, and calls take seconds."""
    faults: FaultSettings = field(default_factory=FaultSettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    fresh_for_s: float = 10.0
    """How old a report may be to count as evidence for a gate (I6): five reports."""
    ledger: LedgerLimits = field(default_factory=LedgerLimits)
    shares: ShareSettings = field(default_factory=ShareSettings)
