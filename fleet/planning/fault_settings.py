"""Times and limits of the planner of faults, each with its source."""

from dataclasses import dataclass


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
    """In `repairs_window_s` on one node; then a person must look (design.md, faults)."""
    repairs_window_s: float = 7 * 86400.0
    close_after_s: float = 60.0
    """How long a fault must be gone before its incident closes, so that one that comes and goes stays one incident."""
    muted_s: float = 3600.0
    """How long a dismissed incident stays quiet while there is no new evidence; a person may look again by then."""
    note_every_s: float = 15.0
    """How often an open incident is told that its fault is still there; well below `close_after_s`."""
    witness_age_s: float = 10.0
    """How old the word of an ingress may be: it reports every 2 s, and is suspect after this long like any agent."""
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
