"""Times and limits of the reconciler, each with its source."""

from dataclasses import dataclass, field

from fleet.planning.claims import ShareSettings
from fleet.planning.ledger import LedgerLimits


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
