"""Data of the pages about cells: members, load, software, and the effects of actions. Reads only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db.models import Case, F, FilteredRelation, Prefetch, Q, QuerySet, When

from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.lists import Column, List, ListPage
from engine_agent.protocol.fingerprint import first_mismatch
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.states import MemberRole
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import Deployment
from fleet.deployments.selectors import engine_on
from fleet.load.pages import load_of, report_of, silent_s
from fleet.load.planner import FRESH_FOR_S
from fleet.load.selectors import deployment_subject, last_windows
from fleet.nodes.models import Node, NodeReport, holds_since
from fleet.nodes.planner import compare_stacks, member_stacks, stack_digest
from fleet.placement.planning.distance import depth_of, distance
from fleet.reconcile.planning.states import CellState
from kernel.models import Event
from models_registry.versions.models import ModelVersion

CELLS_BESIDE = 50
"""Maximum rows of a list that is part of another page."""
SUMMARY_COLUMNS = (
    "cell_id", "rank", "node__id", "node__state",
    "node__report__cell", "node__report__generation", "node__report__last_seen_at", "node__report__load",
    "node__report__connected", "node__report__quiet",
)  # fmt: skip
"""Member columns of a list. Reading all columns would take longer than rendering."""
_OF_VERSION = {field.name for field in ModelVersion._meta.concrete_fields} - {"id", "model", "version"}
UNLISTED = ("secret", *(f"model_version__{name}" for name in sorted(_OF_VERSION)))
"""Columns that a list of cells does not show: nine of a version are JSON."""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A node in its cell. `distance`: levels of the network topology that it does not share with its leader."""

    node: Node
    rank: int
    role: MemberRole
    report: NodeReport | None
    silent_s: float | None
    distance: int | None


@dataclass(frozen=True, slots=True)
class CellRow:
    """A cell with its members by rank; `load` is None without a fresh report of its leader. `successor`: the cell that
    takes the place of a drained one, "" until it exists."""

    cell: Cell
    members: tuple[MemberRow, ...]
    load: Load | None
    successor: str = ""


@dataclass(frozen=True, slots=True)
class CellSummary:
    """A cell in a list, with only the names of its members."""

    cell: Cell
    members: tuple[CellMember, ...]
    load: Load | None


@dataclass(frozen=True, slots=True)
class FingerprintLine:
    """One field of the members' software, by rank. If the values differ (`agrees` is False), the cell must not
    serve."""

    part: str
    values: tuple[str, ...]
    agrees: bool


@dataclass(frozen=True, slots=True)
class Stack:
    """Software of a cell's members, differing fields first. `digests`: by rank, "" without a report; `mismatch`: why
    the cell cannot start, or ""."""

    members: tuple[MemberRow, ...]
    digests: tuple[str, ...]
    lines: tuple[FingerprintLine, ...]
    mismatch: str


def cells_with_members() -> "QuerySet[Cell]":
    """Cells with everything that a row needs, in two queries."""
    members = CellMember.objects.select_related("node", "node__report").order_by("rank")
    return Cell.objects.select_related("model_version").prefetch_related(Prefetch("members", queryset=members))


def cells_summary() -> "QuerySet[Cell]":
    """Cells with everything that a list shows, in two queries."""
    members = CellMember.objects.select_related("node__report").only(*SUMMARY_COLUMNS).order_by("rank")
    cells = Cell.objects.select_related("model_version").defer(*UNLISTED)
    return cells.prefetch_related(Prefetch("members", queryset=members))


def cell_row(cell: Cell, now: datetime) -> CellRow:
    members = tuple(cell.members.all())
    leader = _leader(members)
    return CellRow(cell, tuple(_member_row(member, leader, now) for member in members), _cell_load(cell, leader, now))


def _summary(cell: Cell, now: datetime) -> CellSummary:
    members = tuple(cell.members.all())
    return CellSummary(cell, members, _cell_load(cell, _leader(members), now))


def _leader(members: Sequence[CellMember]) -> Node | None:
    return members[0].node if members and members[0].rank == 0 else None


def _cell_load(cell: Cell, leader: Node | None, now: datetime) -> Load | None:
    return load_of(cell, report_of(leader), now) if leader else None


def _listed(request: PageRequest) -> "QuerySet[Cell]":
    """Leaves out stopped cells unless `state` selects them."""
    state, text = request.text("state"), request.text("q")
    cells = cells_summary().filter(state=state) if state else cells_summary().exclude(state=CellState.STOPPED)
    for column in ("deployment", "region"):
        if name := request.text(column):
            cells = cells.filter(**{f"{column}_id": name})
    if text:
        cells = cells.filter(Q(id__icontains=text) | Q(reason__icontains=text))
    figure = SORTED_LOAD.get(request.text("sort").removeprefix("-"))
    return _with_figure(cells, figure, request.now) if figure else cells


SORTED_LOAD = {
    "in-flight": "in_flight",
    "queued": "queued",
    "tokens": "tokens_per_s",
    "ttft-p50": "ttft_p50_ms",
    "ttft-p99": "ttft_p99_ms",
}
"""Column -> figure of the load that it shows."""
FIGURE = "its_figure"


def _with_figure(cells: "QuerySet[Cell]", name: str, now: datetime) -> "QuerySet[Cell]":
    """Cells with a figure of the load that `load_of` shows, to sort by. Joins: a subquery for each cell would take
    several times longer."""
    report = "leader__node__report"
    fresh = Q(**{f"{report}__cell": F("pk"), f"{report}__generation": F("generation")})
    fresh &= holds_since(now - timedelta(seconds=FRESH_FOR_S), f"{report}__")
    leader = FilteredRelation("members", condition=Q(members__rank=0))
    return cells.alias(leader=leader).alias(**{FIGURE: Case(When(fresh, then=F(f"{report}__load__{name}")))})


def _load_value(name: str) -> Callable[[CellSummary], object]:
    return lambda row: getattr(row.load, name, None)


CELL_LIST: List[CellSummary] = List(
    name="cells",
    columns=(
        Column("cell", "Cell", lambda row: row.cell.pk, ("id",)),
        Column("state", "State", lambda row: row.cell.state, ("state",)),
        Column("version", "Version", lambda row: row.cell.model_version.reference, ("model_version",), "wide"),
        Column("generation", "Generation", lambda row: row.cell.generation, ("generation",), "wide number"),
        Column("nodes", "Nodes", lambda row: " ".join(member.node_id for member in row.members), css="wide"),
        Column("in-flight", "In flight", _load_value("in_flight"), (FIGURE,), "number"),
        Column("queued", "Queued", _load_value("queued"), (FIGURE,), "wide number"),
        Column("tokens", "Tokens/s", _load_value("tokens_per_s"), (FIGURE,), "wide number"),
        Column("ttft-p50", "TTFT p50", _load_value("ttft_p50_ms"), (FIGURE,), "wide number"),
        Column("ttft-p99", "TTFT p99", _load_value("ttft_p99_ms"), (FIGURE,), "number"),
        Column("since", "In this state", lambda row: row.cell.state_since, ("state_since",), "wide number"),
    ),
    query=_listed,
    rows=lambda cells, now: [_summary(cell, now) for cell in cells],
    order=("deployment_id", "region__position", "region_id", "created_at", "id"),
    filters=("deployment", "region", "state", "q"),
)


def cells_of(deployment: str, now: datetime) -> ListPage[CellSummary]:
    """The first live cells of a deployment, those that are not ready first."""
    ready_last = Case(When(state=CellState.READY.value, then=1), default=0)
    cells = cells_summary().filter(deployment_id=deployment).exclude(state=CellState.STOPPED)
    ordered = cells.order_by(ready_last, "region__position", "region_id", "created_at", "id")
    return CELL_LIST.part(list(ordered[: CELLS_BESIDE + 1]), now, CELLS_BESIDE)


def cell_find(*, cell_id: str, now: datetime) -> CellRow | None:
    cell = cells_with_members().filter(pk=cell_id).first()
    return replace(cell_row(cell, now), successor=_successor(cell)) if cell else None


def _successor(cell: Cell) -> str:
    """The first cell of the same deployment, region and role that was created after this one began to drain."""
    if cell.state not in {CellState.DRAINING, CellState.STOPPED}:
        return ""
    drained = Event.objects.filter(cell=cell.pk, kind=f"cell.{CellState.DRAINING}").order_by("-id").first()
    same = Cell.objects.filter(deployment=cell.deployment_id, region=cell.region_id, role=cell.role)
    later = same.filter(created_at__gte=drained.at).exclude(pk=cell.pk) if drained else same.none()
    return later.order_by("created_at", "id").values_list("id", flat=True).first() or ""


def cell_stack(row: CellRow) -> Stack:
    """The members' fingerprints side by side, in the fields relevant for the cell's engine."""
    engine = engine_on(row.cell.model_version, row.cell.instance_type_id)
    ranks = member_stacks(engine, ((member.rank, member.node.pk, member.node.fingerprint) for member in row.members))
    stacks = {rank.node: rank.fingerprint for rank in ranks}
    differing = {difference.field for difference in compare_stacks(ranks).differing}
    parts = {part for fingerprint in stacks.values() for part in fingerprint}
    return Stack(
        members=row.members,
        digests=tuple(stack_digest(member.node.fingerprint, engine) for member in row.members),
        lines=tuple(
            FingerprintLine(
                part=part,
                values=tuple(stacks.get(member.node.pk, {}).get(part, "") for member in row.members),
                agrees=part not in differing,
            )
            for part in sorted(parts, key=lambda part: (part not in differing, part))
        ),
        mismatch=first_mismatch(ranks),
    )


def topology_distance(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Levels below the last common one, 0 below the same leaf, or None if either topology is unknown."""
    return distance(one, other, depth_of((one, other))) if one and other else None


def _member_row(member: CellMember, leader: Node | None, now: datetime) -> MemberRow:
    report = report_of(member.node)
    return MemberRow(
        node=member.node,
        rank=member.rank,
        role=member.role,
        report=report,
        silent_s=silent_s(report, now),
        distance=topology_distance(leader.topology, member.node.topology) if leader else None,
    )


def drain_effect(row: CellRow, now: datetime) -> str:
    """The effect of draining the cell, in three queries."""
    deadline_s = Deployment.objects.values_list("drain_deadline_s", flat=True).get(pk=row.cell.deployment_id)
    others = _other_ready_cells(row.cell)
    in_flight = (
        "Requests in flight have"
        if row.load is None
        else f"{_requests_text(row.load)} in flight {_has_or_have(row.load)}"
    )
    return (
        f"It gets no new requests. {in_flight} {deadline_s:g} s to finish. "
        f"{_remaining_text(row.cell, others)}{_load_moved_text(row.cell, others, now)}. A new cell takes its place."
    )


def restart_effect(row: CellRow, now: datetime) -> str:
    """The effect of restarting the cell, in one query."""
    if row.cell.state != CellState.READY:
        return "It starts now instead of waiting for its back-off. The engine restarts on the same nodes."
    in_flight = "Requests in flight" if row.load is None else f"{_requests_text(row.load)} in flight"
    verb = "is" if row.load and row.load.in_flight == 1 else "are"
    remaining = _remaining_text(row.cell, _other_ready_cells(row.cell))
    return f"{in_flight} {verb} cut. {remaining}. The engine restarts on the same nodes."


def _requests_text(load: Load) -> str:
    return f"{load.in_flight} request{'' if load.in_flight == 1 else 's'}"


def _has_or_have(load: Load) -> str:
    return "has" if load.in_flight == 1 else "have"


def _remaining_text(cell: Cell, others: int) -> str:
    cells = "1 other ready cell" if others == 1 else f"{others or 'No'} other ready cells"
    return f"{cells} of {cell.deployment_id} remain{'s' if others == 1 else ''} in {cell.region_id}"


def _other_ready_cells(cell: Cell) -> int:
    ready = Cell.objects.filter(deployment=cell.deployment_id, region=cell.region_id, state=CellState.READY.value)
    return ready.exclude(pk=cell.pk).count()


def _load_moved_text(cell: Cell, others: int, now: datetime) -> str:
    """The load that other cells would take over, from the latest window of the deployment in this region."""
    subject = deployment_subject(cell.deployment_id, cell.region_id)
    point = last_windows([subject], now).get(subject)
    if point is None or not others:
        return ""
    before, after = point.in_flight / (others + 1), point.in_flight / others
    return f", at {after:.1f} requests in flight each instead of {before:.1f}"
