"""Times and limits of the reconciler, each with its source."""

from dataclasses import dataclass, field

from fleet.planning.fault_settings import FaultSettings
from fleet.planning.ledger import LedgerLimits


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Seconds unless the name says otherwise."""

    doubt_after_s: float = 3.0
    """Silence after which the provider is asked: one missed report (every 2 s ± 10 %) and some."""
    agent_restart_after_s: float = 1.0
    """Wait after a connection closed before its agent is started again: the machine may be dying, not the agent."""
    suspect_after_s: float = 10.0
    """Five reports missed; Nomad's heartbeat TTL is the same."""
    lost_after_s: float = 30.0
    """Silence that, with a second witness, makes a node lost. Kubernetes takes 40 s."""
    launch_grace_s: float = 10.0
    """How long a provider may not know yet of a machine that it was asked for: clouds list new ones seconds later."""
    join_timeout_s: float = 120.0
    """A machine that has not enrolled by then will not: GPUStack gives a worker 150 s."""
    unhealthy_after_s: float = 10.0
    """How long a ready cell may answer no probe before it is failed; the ingress has left it long before."""
    start_grace_s: float = 30.0
    """Beyond the version's own ready timeout, for an agent that never says anything."""
    load_age_s: float = 1.5
    """How old the load in a report may be when it comes: the agent asks every 0.2 s and waits 1 s for an answer."""
    restart_backoff_s: float = 2.0
    """First wait before a failed cell starts again; doubles with each start that did not become ready."""
    restart_backoff_max_s: float = 300.0
    explanations_per_pass: int = 20
    """Cells that are told anew what they wait for; each is a row in the timeline, and the first ones matter most."""
    surplus_after_s: float = 300.0
    """How long a spare beyond the wanted number stays before it is given back."""
    failed_launch_kept_s: float = 30.0
    """Wait between two launches in place of a machine that never joined."""
    misfits_kept: int = 4
    """Idle spares that fit no waiting cell beyond which no nearer ones are bought in hope: providers may not listen."""
    launches_per_pass: int = 8
    """Bound on the machines that one pass asks a provider for, so that a wrong number cannot buy a thousand."""
    faults: FaultSettings = field(default_factory=FaultSettings)
    fresh_for_s: float = 10.0
    """How old a report may be to count as evidence for a gate (I6): five reports."""
    ledger: LedgerLimits = field(default_factory=LedgerLimits)
