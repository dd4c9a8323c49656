"""Decides a cell's state from the reports of its members about its current generation, and when a draining cell may
stop: when it is unrouted and idle, or its time is over. Also compares a cell with its siblings, for people who ask why
it is slow. Never starts or drains cells."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from engine_agent.protocol.fingerprint import first_mismatch
from engine_agent.protocol.states import EngineState
from fleet.faults.planning.announced import Notices
from fleet.nodes.planner import member_stacks
from fleet.placement.planning.packing import is_idle
from fleet.reconcile.planning.decisions import Decision, MoveCell
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, FleetView, NodeView
from fleet.reconcile.planning.states import DEAD, CellState
from kernel.ages import age_text

RUNNING = frozenset({CellState.STARTING, CellState.READY, CellState.DRAINING})


def plan_health(fleet: FleetView, settings: FleetSettings, now: datetime) -> tuple[Decision, ...]:
    """Changes of cell states that follow from observation alone."""
    running = (cell for cell in fleet.cells.values() if cell.state in RUNNING)
    return tuple(decision for cell in running if (decision := _next_state(cell, fleet, settings, now)) is not None)


def _next_state(cell: CellView, fleet: FleetView, settings: FleetSettings, now: datetime) -> Decision | None:
    members = [(member, fleet.nodes[member.node]) for member in cell.members]
    for member, node in members:
        if node.state in DEAD:
            return _move_cell(cell, CellState.LOST, f"rank {member.rank} on {node.id} is {node.state}")
    for member, node in members:
        if node.report.is_about(cell) and node.report.state is EngineState.FAILED:
            return _move_cell(cell, CellState.FAILED, f"rank {member.rank} on {node.id}: {node.report.reason}", node.id)
    if cell.state is CellState.STARTING:
        mismatch = _mismatch(cell, fleet)
        if mismatch:
            return _move_cell(cell, CellState.FAILED, mismatch)
        age_s = fleet.listening_for_s(cell.state_since, now)
        return _next_state_of_starting(cell, [node for _, node in members], age_s, fleet, settings)
    if cell.state is CellState.READY:
        return _next_state_of_ready(cell, members[0][1], settings)
    return None


def _mismatch(cell: CellView, fleet: FleetView) -> str:
    """Why the members' software does not match (I2), or "". The engines compare again, including flags and weights."""
    engine = fleet.deployments[cell.deployment].of_cell(cell).engine
    software = ((member.rank, member.node, fleet.nodes[member.node].software) for member in cell.members)
    return first_mismatch(member_stacks(engine, software))


def _next_state_of_ready(cell: CellView, leader: NodeView, settings: FleetSettings) -> Decision | None:
    """Fails a cell whose reports were unhealthy for long enough. Missing reports are left to
    `faults.planning.liveness`."""
    report = leader.report
    if not report.is_about(cell) or report.unhealthy_since is None or report.last_seen_at is None:
        return None
    unhealthy_s = (report.last_seen_at - report.unhealthy_since).total_seconds()
    if unhealthy_s <= settings.unhealthy_after_s:
        return None
    why = report.health_reason or "no reason given"
    return _move_cell(
        cell, CellState.FAILED, f"rank 0 on {leader.id} unhealthy for {age_text(unhealthy_s)}: {why}", leader.id
    )


def _next_state_of_starting(
    cell: CellView, nodes: list[NodeView], age_s: float, fleet: FleetView, settings: FleetSettings
) -> Decision | None:
    if all(node.report.is_about(cell) and node.report.state is EngineState.READY for node in nodes):
        return _move_cell(cell, CellState.READY, f"all {len(nodes)} ranks are ready")
    timeout_s = fleet.deployments[cell.deployment].of_cell(cell).ready_timeout_s + settings.start_grace_s
    if age_s > timeout_s:
        waiting = ", ".join(node.id for node in nodes if node.report.state is not EngineState.READY)
        return _move_cell(cell, CellState.FAILED, f"not ready within {timeout_s:.0f} s; waiting for {waiting}")
    return None


def _move_cell(cell: CellView, to: CellState, reason: str, failed_by: str = "") -> MoveCell:
    return MoveCell(cell.id, cell.state, cell.generation, to, reason, failed_by)


def drain_ended(cell: CellView, notices: Notices) -> str:
    """Why the drain of this cell is over, or "". A cell on a machine that its provider ends may keep serving until then
    unless a spare waits for its place."""
    fleet, settings, now = notices.fleet, notices.settings, notices.now
    deadline_s = fleet.deployments[cell.deployment].drain_deadline_s
    in_flight = last_in_flight(cell, fleet, settings, now)
    if in_flight == 0:
        return "drained: unrouted and idle"
    left = "an unknown number of" if in_flight is None else in_flight
    ends_at = notices.end_of_cell(cell)
    if ends_at is not None and ends_at - now <= timedelta(seconds=settings.notices.last_s):
        return f"one of its machines ends at {ends_at:%H:%M:%S} UTC, with {left} requests in flight"
    if fleet.listening_for_s(cell.state_since, now) > deadline_s and (ends_at is None or _has_spare(cell, fleet)):
        return f"drain deadline of {deadline_s:.0f} s passed with {left} requests in flight"
    return ""


def _has_spare(cell: CellView, fleet: FleetView) -> bool:
    pool = (cell.region, cell.instance_type)
    nodes = (node for node in fleet.nodes.values() if (node.region, node.instance_type) == pool)
    return any(is_idle(node) and fleet.cell_of(node.id) is None for node in nodes)


def last_in_flight(cell: CellView, fleet: FleetView, settings: FleetSettings, now: datetime) -> int | None:
    """Requests in flight, if measured after new requests stopped arriving; otherwise None. Older measurements may miss
    a request that arrived in between."""
    if not cell.members:
        return 0
    leader = fleet.nodes[cell.members[0].node]
    report, holds_until = leader.report, fleet.holds_until(leader, now)
    if cell.unrouted_at is None or holds_until is None or not report.is_about(cell):
        return None
    age_s = (holds_until - cell.unrouted_at).total_seconds()
    return report.in_flight if age_s >= settings.load_age_s else None


class Stage(StrEnum):
    """Where the time of a request goes, in its order, and what decides it."""

    WORK = "work"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure by which cells are compared. `worse`: 1 if more is worse, -1 if less is, 0 if it only explains."""

    name: str
    title: str
    unit: str
    stage: Stage
    worse: int = 0


FIGURES = (
    Figure("requests_per_s", "Requests", "/s", Stage.WORK),
    Figure("prompt_per_request", "Prompt", "tokens", Stage.WORK),
    Figure("tokens_per_request", "Answer", "tokens", Stage.WORK),
    Figure("cache_hit_percent", "Prompt found in the prefix cache", "%", Stage.WORK, -1),
    Figure("running", "Batch", "requests", Stage.WORK),
    Figure("queued", "Queued at the ingress and the proxy", "requests", Stage.QUEUE, 1),
    Figure("waiting", "Waiting in the engine", "requests", Stage.QUEUE, 1),
    Figure("kv_percent", "KV cache in use", "%", Stage.QUEUE, 1),
    Figure("preemptions_per_s", "Preemptions", "/s", Stage.QUEUE, 1),
    Figure("ttft_p50_ms", "Time to first token, median", "ms", Stage.PREFILL, 1),
    Figure("ttft_p95_ms", "Time to first token, p95", "ms", Stage.PREFILL, 1),
    Figure("itl_p50_ms", "Time between tokens, median", "ms", Stage.DECODE, 1),
    Figure("itl_p95_ms", "Time between tokens, p95", "ms", Stage.DECODE, 1),
    Figure("step_ms", "Step of the engine", "ms", Stage.DECODE, 1),
    Figure("cpu_percent", "Host CPU", "%", Stage.HOST, 1),
    Figure("memory_percent", "Host memory", "%", Stage.HOST, 1),
    Figure("clock_percent", "Slowest clock of its devices", "%", Stage.HOST, -1),
    Figure("temperature_c", "Hottest device", "°C", Stage.HOST, 1),
)
STANDS_OUT = 1.25
"""Times the siblings' median; less is ordinary scatter."""
Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a cell, with the median and the range of its siblings. `stands_out`: worse than every sibling, by
    more than `STANDS_OUT`."""

    figure: Figure
    own: float
    median: float
    lowest: float
    highest: float
    stands_out: bool

    @property
    def ratio(self) -> float | None:
        return self.own / self.median if self.median else None


def compare_with_siblings(own: Figures, siblings: Sequence[Figures]) -> tuple[Compared, ...]:
    """The figures that the cell and at least one sibling have, in the order of `FIGURES`."""
    found = []
    for figure in FIGURES:
        here = own.get(figure.name)
        there = [value for sibling in siblings if (value := sibling.get(figure.name)) is not None]
        if here is None or not there:
            continue
        median, lowest, highest = statistics.median(there), min(there), max(there)
        is_more = here > highest and here > STANDS_OUT * median
        is_less = here < lowest and STANDS_OUT * here < median
        stands_out = is_more if figure.worse > 0 else is_less if figure.worse < 0 else False
        found.append(Compared(figure, here, median, lowest, highest, stands_out))
    return tuple(found)
