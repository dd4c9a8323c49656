"""Finds slow nodes. A cell runs in lock-step, so one slow node slows all of its members. Only a rank's own computing
time, without waiting, tells them apart. It is compared per batch size with its cohort: the same role in cells of the
same version on the same machines.

The ranks of one cell of three nodes or more are a cohort as well: they compute the same batches of the same contexts,
so that few cells suffice.

Drivers of devices show a second kind of evidence: a clock below `slow_score` of the maximum, for a reason that is
trouble of the machine (`SLOW_CLOCK_REASONS`). It needs no cohort, and tells ranks apart where steps are not measured,
as on CUDA.

Neuron's tools and driver show neither clocks nor reasons, and its collectives run on the devices, so that a rank's own
time cannot be measured. There, and for other engines without measured ranks, the time between two tokens that the
cell's proxy saw is the step of the whole cell. It is compared with cells of the same version and machines, and only
opens an incident, because longer contexts make a cell slower as well. A node without any of this is never slow."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

from engine_agent.protocol.metrics import BUCKETS, batch_bucket, midpoint_s
from engine_agent.protocol.signatures import SLOW_CLOCK_REASONS
from engine_agent.protocol.states import CellRole, MemberRole
from fleet.faults.planning.views import StepWindow
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.snapshot import FleetView

MAD_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution is its standard deviation divided by this."""


@dataclass(frozen=True, slots=True, order=True)
class Cohort:
    """Nodes that may be compared with each other."""

    version: str
    instance_type: str
    role: MemberRole
    cell_role: CellRole = CellRole.MIXED
    cell: str = ""
    """Of the ranks of one cell."""
    of_cells: bool = False
    """Of whole cells, by their leaders."""

    def __str__(self) -> str:
        if self.cell:
            return f"ranks of {self.cell}"
        role = "" if self.cell_role is CellRole.MIXED else f"{self.cell_role} "
        if self.of_cells:
            return f"{role}cells of {self.version} on {self.instance_type}"
        return f"{self.role}s of {self.version}{f' {role}cells' if role else ''} on {self.instance_type}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One node in one window. `score`: its speed relative to the cohort's median; `z`: its robust z-score."""

    index: int
    score: float
    z: float


@dataclass(frozen=True, slots=True)
class Throttled:
    """A device of a node in one window: the average `clock` as a share of the maximum, and the reason of most of the
    time."""

    index: int
    device: str
    clock: float
    reason: str


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node that is slower than its cohort, or whose driver lowers a clock for trouble of the machine, and the windows
    that show it."""

    node: str
    cohort: Cohort
    cohort_nodes: tuple[str, ...]
    slow: tuple[Measured, ...]
    windows: int
    throttled: tuple[Throttled, ...] = ()

    @property
    def reason(self) -> str:
        found = [text for text in (self._step_text(), self._clock_text()) if text]
        return "; ".join(found)

    def _clock_text(self) -> str:
        if not self.throttled:
            return ""
        worst = min(self.throttled, key=lambda one: one.clock)
        why = SLOW_CLOCK_REASONS.get(worst.reason, "")
        return (
            f"{worst.device} ran at {worst.clock:.0%} of its clock in {len(self.throttled)} of {self.windows} windows, "
            f"{worst.reason}: {why}"
        )

    def _step_text(self) -> str:
        if not self.slow:
            return ""
        worst = min(self.slow, key=lambda node: node.score)
        others = "the other ranks of its cell" if self.cohort.cell else "its cohort"
        return (
            f"slower than {others} in {len(self.slow)} of {self.windows} windows: score {worst.score:.2f}, "
            f"robust z {worst.z:.1f}, {len(self.cohort_nodes) - 1} peers"
        )


Windows = dict[str, tuple[StepWindow, ...]]
"""Node -> its windows, oldest first."""

_compared: dict[Cohort, tuple[Windows, FaultSettings, tuple[SlowNode, ...]]] = {}
"""Results per cohort, because windows end every 30 s and passes run every second."""


def find_slow(fleet: FleetView, settings: FaultSettings) -> tuple[SlowNode, ...]:
    """Nodes that are slow in enough of the recent windows, sorted by ID."""
    cohorts = _cohorts(fleet, settings)
    for gone in [cohort for cohort in _compared if cohort not in cohorts]:
        _compared.pop(gone, None)
    slow_nodes: dict[str, SlowNode] = {}
    for cohort, nodes in sorted(cohorts.items(), key=lambda item: (bool(item[0].cell), item[0])):
        for slow in _found_in(cohort, nodes, settings):
            known = slow_nodes.get(slow.node)
            if known is None or not known.slow:
                slow_nodes[slow.node] = replace(slow, throttled=known.throttled if known else slow.throttled)
    return tuple(slow_nodes[node] for node in sorted(slow_nodes))


def _found_in(cohort: Cohort, nodes: Windows, settings: FaultSettings) -> tuple[SlowNode, ...]:
    """Compares again only if the windows or settings changed."""
    last = _compared.get(cohort)
    if last is None or last[:2] != (nodes, settings):
        by_index = {node: {window.index: window for window in known} for node, known in nodes.items()}
        slow = {one.node: one for one in _slow_in(cohort, by_index, settings)}
        names = tuple(sorted(nodes))
        for node, throttled in () if cohort.cell else _throttled_in(nodes, settings):
            known = slow.get(node) or SlowNode(node, cohort, names, (), settings.step_windows)
            slow[node] = replace(known, throttled=throttled)
        last = _compared[cohort] = (nodes, settings, tuple(slow[node] for node in sorted(slow)))
    return last[2]


def relative_times(
    windows: Mapping[str, StepWindow], settings: FaultSettings, peers: int | None = None
) -> dict[str, float]:
    """Node -> its step time relative to the cohort's median at the same batch sizes, weighted by its own steps. A batch
    size counts if the node and at least `peers` others (by default `slow_peers`) ran it `slow_steps` times."""
    least = settings.slow_peers if peers is None else peers
    means: dict[int, dict[str, float]] = defaultdict(dict)
    for node, window in windows.items():
        for bucket, steps in window.steps.items():
            if steps >= settings.slow_steps:
                means[bucket][node] = window.compute_ms.get(bucket, 0.0) / steps
    usual = {bucket: median(known.values()) for bucket, known in means.items() if len(known) > least}
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


def _throttled_in(nodes: Windows, settings: FaultSettings) -> Iterable[tuple[str, tuple[Throttled, ...]]]:
    """Nodes with a device that was throttled in enough of the recent windows, with its windows."""
    newest = max((window.index for windows in nodes.values() for window in windows), default=0)
    for node, windows in nodes.items():
        found: dict[str, list[Throttled]] = defaultdict(list)
        for window in windows:
            if window.index <= newest - settings.step_windows:
                continue
            for device, seen in window.devices.items():
                reason, share = max(seen.reasons.items(), key=lambda one: (one[1], one[0]), default=("", 0.0))
                if share >= settings.throttled_share and seen.clock < settings.slow_score:
                    found[device].append(Throttled(window.index, device, seen.clock, reason))
        for device in sorted(found, key=lambda name: (-len(found[name]), name))[:1]:
            if len(found[device]) >= settings.step_windows_slow:
                yield node, tuple(found[device])


def _slow_in(
    cohort: Cohort, nodes: Mapping[str, Mapping[int, StepWindow]], settings: FaultSettings
) -> Iterable[SlowNode]:
    newest = max(index for windows in nodes.values() for index in windows)
    peers = settings.slow_mates if cohort.cell else settings.slow_peers
    slow: dict[str, list[Measured]] = defaultdict(list)
    for left in range(settings.step_windows, 0, -1):
        if max((len(slow_windows) for slow_windows in slow.values()), default=0) + left < settings.step_windows_slow:
            break  # no node can become slow enough: the usual case, and half the work
        index = newest - left + 1
        times = relative_times({node: known[index] for node, known in nodes.items() if index in known}, settings, peers)
        if len(times) <= peers:
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


def _cohorts(fleet: FleetView, settings: FaultSettings) -> dict[Cohort, Windows]:
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
                of_cell = mine[-1].of_cell
                cohort = Cohort(version, fleet.nodes[member.node].instance_type, role, cell.role, of_cells=of_cell)
                cohorts[cohort][member.node] = mine
                if len(cell.members) > settings.slow_mates and not of_cell:
                    cohorts[replace(cohort, role=MemberRole.LEADER, cell=cell.id)][member.node] = mine
    return cohorts


# --- windows of what nodes report -----------------------------------------------------------------------------------

Sums = dict[str, Any]
NO_STEPS: Sums = {"steps": {}, "compute_ms": {}}


def clock_sums(accelerators: Any) -> dict[str, Any]:
    """The sums of the clocks of a node's devices, by name."""
    found = {}
    for device in accelerators if isinstance(accelerators, list) else ():
        if clocks := device.get("clocks"):
            sums = {name: clocks.get(name, 0) for name in ("sampled_ms", "full_clock_ms")}
            reasons = {why: ms for why, ms in clocks.get("reason_ms", {}).items() if why in SLOW_CLOCK_REASONS}
            found[f"{device['kind']} {device['index']}"] = {**sums, "reason_ms": reasons}
    return found


def window_between(before: Sums, after: Sums) -> Sums:
    """Returns the increase of steps and of the clocks of devices, or {} if there is none."""
    of_cell = _more_of_cell(before.get("of_cell", {}), after.get("of_cell", {}))
    steps = _more_steps(before, after) or of_cell
    return {**steps, **_more_clocks(before.get("devices", {}), after.get("devices", {}))}


def cell_sums(rank: int | None, itl_counts: Any, work: Any) -> dict[str, Any]:
    """The sums of a leader's proxy, for engines that do not measure their ranks: times between tokens by bucket, steps
    and tokens of the engine."""
    if rank != 0 or not isinstance(itl_counts, dict) or not isinstance(work, dict):
        return {}
    steps, tokens = work.get("steps", 0), work.get("completion_tokens", 0)
    return {"since": work.get("since"), "itl": itl_counts, "steps": steps, "tokens": tokens}


def _more_of_cell(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sums:
    """The median time between tokens as the step of an average batch. The median is that of a decode step: few steps
    read prompts, and those are in the tail."""
    if not before or not after or before["since"] != after["since"]:
        return {}
    was, now = before["itl"], after["itl"]
    grown = {int(bucket): now.get(bucket, 0) - was.get(bucket, 0) for bucket in was.keys() | now.keys()}
    total, steps, tokens = sum(grown.values()), after["steps"] - before["steps"], after["tokens"] - before["tokens"]
    if total <= 0 or steps <= 0 or tokens < 0 or min(grown.values()) < 0:
        return {}
    reached = zip(sorted(grown), accumulate(grown[bucket] for bucket in sorted(grown)), strict=True)
    middle = next(bucket for bucket, below in reached if 2 * below >= total)
    batch = str(batch_bucket(round(tokens / steps)))
    median_ms = 1000 * midpoint_s(min(max(middle, 0), BUCKETS - 1))
    return {"steps": {batch: total}, "compute_ms": {batch: round(total * median_ms, 3)}, "of_cell": True}


def _more_clocks(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sums:
    """Shares of the time in which devices were in use. Nothing of devices whose reader started again."""
    found = {}
    for name, sums in after.items():
        known = before.get(name, {"sampled_ms": 0, "full_clock_ms": 0, "reason_ms": {}})
        sampled_ms = sums["sampled_ms"] - known["sampled_ms"]
        if name in before and sampled_ms > 0:
            reasons = {why: (ms - known["reason_ms"].get(why, 0)) / sampled_ms for why, ms in sums["reason_ms"].items()}
            found[name] = {
                "clock": round((sums["full_clock_ms"] - known["full_clock_ms"]) / sampled_ms, 3),
                "reasons": {why: round(share, 3) for why, share in reasons.items() if share > 0},
            }
    return {"devices": found} if found else {}


def _more_steps(before: Sums, after: Sums) -> Sums:
    """Returns the increase, or {} if there is none or the engine's counters were reset."""
    grown = {bucket: total - before["steps"].get(bucket, 0) for bucket, total in after["steps"].items()}
    steps = {bucket: more for bucket, more in grown.items() if more != 0}
    if not steps or any(more < 0 for more in steps.values()):
        return {}
    compute_ms = {b: after["compute_ms"].get(b, 0.0) - before["compute_ms"].get(b, 0.0) for b in steps}
    return {"steps": steps, "compute_ms": compute_ms}
