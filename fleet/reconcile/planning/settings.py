"""Times and limits of the reconciler with their sources, and the disruption ledger: whether one more cell may be
drained on purpose, or one more machine divided differently, by the same rule for every cause. Planners evaluate the
rule on a snapshot; services evaluate it again on locked rows. A cell is available once it was ready for its policy's
`min_healthy_s`."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from fleet.autoscaling.planning.role_split import answers
from fleet.deployments.planner import ShareSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView
from fleet.reconcile.planning.states import CellState, DisruptionCause


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """Limits of cells of all deployments that may be down on purpose: a share of the target, or the floor. LWS and ECS
    users commonly allow a tenth per service; the floors let two small deployments move at the same time."""

    region_share: float = 0.10
    region_floor: int = 2
    fleet_share: float = 0.10
    fleet_floor: int = 4
    layout_counts_s: float = 600.0
    """A layout change that takes longer no longer counts: its machine is away, and it must not stop rollouts."""

    def region(self, wanted: int) -> int:
        return max(self.region_floor, int(self.region_share * wanted))

    def fleet(self, wanted: int) -> int:
        return max(self.fleet_floor, int(self.fleet_share * wanted))


@dataclass(frozen=True, slots=True)
class BudgetCounts:
    """Cells of all deployments in a region and in the fleet: wanted, and down on purpose without those for scaling.
    Machines whose layout changes count as one cell each, because the spares for repairs are fewer meanwhile."""

    region_wanted: int
    region_open: int
    fleet_wanted: int
    fleet_open: int


@dataclass(frozen=True, slots=True)
class LedgerCounts(BudgetCounts):
    """Counts for one more disruption, in cells. `open`: down on purpose. The first three cover the deployment, `…_here`
    its cells in the cell's region. `is_available`: the cell is available itself. `available_prefill`: available prefill
    cells, which answer no requests; `is_prefill`: the cell is one."""

    wanted: int
    available: int
    open: int
    wanted_here: int
    available_here: int
    is_available: bool
    available_prefill: int = 0
    is_prefill: bool = False


def refusal(counts: LedgerCounts, cause: DisruptionCause, max_unavailable: int, limits: LedgerLimits) -> str | None:
    """Why this cell may not be drained now, or None (I1, I10). Preemption follows the policy's limit and counts against
    the budgets even if no cell is missing, because many deployments may have to make room at the same time."""
    left = counts.available - counts.is_available
    left_here = counts.available_here - counts.is_available
    answering = left - counts.available_prefill + (counts.is_available and counts.is_prefill)
    if counts.wanted > 0 and answering < 1:
        return "no other cell of the deployment is available" + (" except prefill cells" if left else "")
    short, short_here = counts.wanted - left, counts.wanted_here - left_here
    if min(counts.open + 1, short) > max_unavailable:
        return f"{counts.open} cells of the deployment are down on purpose; the limit is {max_unavailable}"
    makes_room = cause is DisruptionCause.PREEMPTION
    if makes_room and counts.open >= max(1, max_unavailable):
        return f"{counts.open} cells of the deployment are down on purpose, and make room one by one"
    if short_here > (0 if makes_room or cause is DisruptionCause.SCALE else max_unavailable):
        return f"{counts.available_here} of {counts.wanted_here} cells in the region are available"
    is_budgeted = short_here > 0 or makes_room
    return budget_refusal(counts, limits) if is_budgeted else None


def budget_refusal(counts: BudgetCounts, limits: LedgerLimits) -> str | None:
    """Why the budgets of region and fleet allow no further cell or machine, or None."""
    if counts.region_open >= limits.region(counts.region_wanted):
        return f"{counts.region_open} cells of the region are down on purpose, which is its budget"
    if counts.fleet_open >= limits.fleet(counts.fleet_wanted):
        return f"{counts.fleet_open} cells of the fleet are down on purpose, which is its budget"
    return None


class Ledger:
    """The ledger of one pass: the snapshot plus the pass's own charges."""

    def __init__(self, fleet: FleetView, limits: LedgerLimits, now: datetime) -> None:
        self._fleet = fleet
        self._limits = limits
        self._available: set[str] = {cell.id for cell in fleet.cells.values() if self._is_available_now(cell, now)}
        self._ready_here: Counter[tuple[str, str]] = Counter()
        self._ready: Counter[str] = Counter()
        self._ready_prefill: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._region_open: Counter[str] = Counter(fleet.layouts_changing)
        for cell in fleet.cells.values():
            self._add_available(cell, int(cell.id in self._available))
            if cell.disruption is not None:
                self._add_open(cell, cell.disruption)
        self._region_wanted: Counter[str] = Counter()
        for deployment in fleet.deployments.values():
            self._region_wanted.update(deployment.cells_wanted)

    def refusal(self, cell: CellView, cause: DisruptionCause) -> str | None:
        """Why a ready cell may not be drained now, or None."""
        deployment = self._fleet.deployments[cell.deployment]
        counts = LedgerCounts(
            wanted=sum(deployment.cells_wanted.values()),
            available=self._ready[cell.deployment],
            open=self._open[cell.deployment],
            wanted_here=deployment.cells_wanted.get(cell.region, 0),
            available_here=self._ready_here[cell.deployment, cell.region],
            **self._budget(cell.region),
            is_available=cell.id in self._available,
            available_prefill=self._ready_prefill[cell.deployment],
            is_prefill=not answers(cell.role),
        )
        return refusal(counts, cause, self._fleet.policy_of(cell.deployment).max_unavailable, self._limits)

    def layout_refusal(self, region: str) -> str | None:
        """Why no machine of the region may get another layout now, or None."""
        return budget_refusal(BudgetCounts(**self._budget(region)), self._limits)

    def charge_layout(self, region: str) -> None:
        """Records that this pass changes the layout of one of the region's machines."""
        self._region_open[region] += 1

    def charge(self, cell: CellView, cause: DisruptionCause) -> None:
        """Records that this pass drains the cell."""
        self._add_available(cell, -int(cell.id in self._available))
        self._available.discard(cell.id)
        self._add_open(cell, cause)

    def is_available(self, cell: CellView) -> bool:
        return cell.id in self._available

    def _budget(self, region: str) -> dict[str, int]:
        """The fields of `BudgetCounts`."""
        return {
            "region_wanted": self._region_wanted[region],
            "region_open": self._region_open[region],
            "fleet_wanted": self._region_wanted.total(),
            "fleet_open": self._region_open.total(),
        }

    def _is_available_now(self, cell: CellView, now: datetime) -> bool:
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
    """Of a pool that may be under replacement; always at least one node (design.md, faults)."""
    frozen_above_share: float = 0.20
    """Of a pool or zone unhealthy: then the cause is not single nodes. NVSentinel's breaker uses 50 %."""
    frozen_above_nodes: int = 2
    """Up to this many unhealthy nodes freeze nothing: in a pool of five the share would block the second repair."""
    common_cause_share: float = 1 / 3
    """Of a cohort with the same fault: then the shared part is at fault (design.md, faults)."""
    common_cause_nodes: int = 3
    """Fewer are treated as coincidence in any cohort."""
    common_cause_window_s: float = 600.0
    """Time window for faults of one cause; a rollout's bake is as long."""
    repairs_allowed: int = 5
    """Per node in `repairs_window_s`; then an operator must inspect it (design.md, faults)."""
    repairs_window_s: float = 7 * 86400.0
    restarts_allowed: int = 3
    """Soft faults of one kind in `repairs_window_s` that the engine's restart may cure; then the device is reset.
    More than two, because errors of memory cluster."""
    attempts_allowed: int = 2
    """Resets, and reboots, of a node in `repairs_window_s`: a fault that comes back twice is not cured by them."""
    reset_limit_s: float = 600.0
    """Until a reset and its deep checks have ended. A reset takes seconds, the checks at most 300 s."""
    reboot_limit_s: float = 1800.0
    """The same for a reboot: machines with many accelerators boot for 15 minutes."""
    close_after_s: float = 60.0
    """Time without the fault before its incident closes, so that a recurring fault stays one incident."""
    muted_s: float = 3600.0
    """How long a dismissed incident stays muted without new evidence."""
    note_every_s: float = 15.0
    """How often an open incident is updated; well below `close_after_s`."""
    witness_age_s: float = 10.0
    """Maximum age of an ingress's report. It reports every 2 s and, like any agent, is suspect after this time."""
    step_window_s: float = 30.0
    """Window of step times: 600 to 1500 decode steps of a 70B model, enough for a steady mean."""
    step_windows: int = 5
    step_windows_slow: int = 3
    """Of `step_windows` in a row: a single stall of seconds is no slow node (design.md, faults)."""
    slow_score: float = 0.7
    """Median step time of the cohort divided by the node's own (design.md, faults)."""
    slow_z: float = 3.5
    """Robust z-score of an outlier: Iglewicz and Hoaglin (1993), and design.md."""
    slow_peers: int = 5
    """Fewer peers are no cohort (design.md, faults)."""
    slow_mates: int = 2
    """The same for the other ranks of a cell. With one, a stall of either would make the other one's speed the norm."""
    slow_mad_share: float = 0.02
    """Minimum spread relative to the cohort's median: identical machines differ by about this much."""
    throttled_share: float = 0.5
    """Of a window in which a device's driver must report trouble as the reason for a low clock: short ones are normal
    while the clock changes (nvml.h)."""
    slow_steps: int = 20
    """With fewer steps at a batch size, their mean is ignored."""


@dataclass(frozen=True, slots=True)
class NoticeSettings:
    """Provider notices. Seconds unless the name says otherwise; `_share` is a fraction of 1."""

    block_lead_s: float = 1800.0
    """Before the machines of a Capacity Block end, which is half an hour before the block's own end. Karpenter starts
    40 minutes before the block's end, we one hour."""
    last_s: float = 10.0
    """A drain ends this long before its machine, so that remaining requests get an error instead of a broken
    connection."""
    margin_s: float = 30.0
    """For passes, tables and agents before a drain's deadline."""
    taken_up_s: float = 5.0
    """Until ingresses send requests to a newly ready cell: a pass, a table and a check take about 2 s."""
    impaired_after_s: float = 300.0
    """How long a provider's checks may fail before an operator is notified. EC2's own alarms take two to five
    minutes."""
    zone_share: float = 1 / 3
    """Of a zone impaired: then the zone is at fault (as `FaultSettings.common_cause_share`)."""
    zone_nodes: int = 3


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Seconds unless the name says otherwise."""

    doubt_after_s: float = 3.0
    """Silence before the provider is queried: slightly more than one missed report (every 2 s ± 10 %)."""
    described_for_s: float = 15.0
    """How long a provider's status of a machine is used; it is queried every second or so."""
    agent_restart_after_s: float = 1.0
    """After a connection closed, before its agent is restarted: the machine may be dying instead."""
    suspect_after_s: float = 10.0
    """Five missed reports, the same as Nomad's heartbeat TTL."""
    lost_after_s: float = 30.0
    """Silence that, with a second witness, makes a node lost. Kubernetes takes 40 s."""
    unreachable_after_s: float = 120.0
    """Silence without a witness after which an operator is notified and an unused node is given up. A restart of agent
    and machine takes less."""
    back_within_s: float = 60.0
    """Time for all agents to reconnect after an outage or a restart of the control plane. A node that reconnected more
    recently is no witness against one that is still away."""
    heard_after_cut_s: float = 10.0
    """A node that was last heard this long after an outage fell silent for another reason: the suspect time, or five
    reports."""
    unhealthy_after_s: float = 10.0
    """How long a ready cell may fail its probes before it fails; ingresses have stopped using it long before."""
    start_grace_s: float = 30.0
    """Added to the version's ready timeout, for an agent that never reports."""
    load_age_s: float = 1.5
    """Maximum age of the load in a report: the agent polls every 0.2 s and waits 1 s for a response."""
    restart_backoff_s: float = 2.0
    """First back-off of a failed cell; doubles with each start that did not become ready."""
    restart_backoff_max_s: float = 300.0
    explanations_per_pass: int = 20
    """Cells per pass that get a new reason for waiting; each is a row in the timeline."""
    surplus_after_s: float = 300.0
    """How long a surplus spare is kept."""
    failed_launch_kept_s: float = 30.0
    """Between two launches in place of a machine that never joined."""
    misfits_kept: int = 4
    """With more idle spares that fit no waiting cell, no nearer ones are bought, because the provider may not place
    them near."""
    launches_per_pass: int = 8
    """Limit of machines ordered per pass, so that a wrong number cannot buy a thousand. The machines of one cell are
    always ordered together."""
    layout_after_s: float = 15.0
    """How long a cell must wait for nodes, and the nodes of a machine be spare, before its layout changes for the cell.
    Machines that are being returned, wiped or launched take that long to become spares."""
    layout_kept_s: float = 60.0
    """How long a machine keeps a layout, so that two deployments do not divide it in turns. Wiping its nodes and
    starting others takes about 10 s."""
    unneeded_order_kept_s: float = 10.0
    """How long an unneeded order is kept, because needs return and calls take seconds."""
    faults: FaultSettings = field(default_factory=FaultSettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    fresh_for_s: float = 10.0
    """Maximum age of a report as evidence for a gate (I6): five reports."""
    ledger: LedgerLimits = field(default_factory=LedgerLimits)
    shares: ShareSettings = field(default_factory=ShareSettings)
