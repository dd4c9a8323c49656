"""Prefill and decode cells on a deployment's page: how many of each, which pair, what was handed over and what fell
back, and what the planner of roles wants."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboard.selectors.load import load_of, report_of
from engine_agent.protocol.messages import HandoverLoad
from engine_agent.protocol.states import CellRole
from fleet.models import Cell, Deployment, DeploymentRegion, RoleState
from fleet.planning.role_split import RoleSplit, counted
from fleet.planning.roles.ratio import RatioRule
from fleet.planning.states import CellState
from fleet.selectors.pairs import Pairings, pairings
from kernel.tones import Tone


@dataclass(frozen=True, slots=True)
class RolePlace:
    """A region by role. `state` None: nobody has planned its roles yet, or a person states them."""

    place: DeploymentRegion
    wanted: RoleSplit
    ready: RoleSplit
    state: RoleState | None

    @property
    def tone(self) -> Tone:
        if self.state is not None and self.state.rule == RatioRule.UNKNOWN:
            return Tone.IDLE
        return Tone.OK if self.ready == self.wanted else Tone.MOVING


@dataclass(frozen=True, slots=True)
class RoleCell:
    """A cell that is told apart. `pairs`: for a decode cell the prefill cells that it may call; `layout`: what both
    have alike. `handovers` None: its leader has not reported lately."""

    cell: Cell
    layout: str
    pairs: tuple[str, ...]
    handovers: HandoverLoad | None

    @property
    def is_decode(self) -> bool:
        return self.cell.role == CellRole.DECODE

    @property
    def is_alone(self) -> bool:
        """A decode cell without a prefill cell of its layout does all by itself."""
        return self.is_decode and not self.pairs


@dataclass(frozen=True, slots=True)
class ReasonRow:
    """Requests that decode cells did alone since their proxies started. `is_fallback`: because a prefill cell failed
    them, rather than by their rules."""

    reason: str
    count: int
    is_fallback: bool

    @property
    def tone(self) -> Tone:
        return Tone.WARN if self.is_fallback else Tone.IDLE


@dataclass(frozen=True, slots=True)
class Roles:
    """What a page shows of one deployment. `handed_over`: requests whose prompts a prefill cell read, since proxies
    started. `are_types_mixed`: it lists several instance types, between which no cell can hand over."""

    deployment: str
    are_types_mixed: bool
    is_planned: bool
    itl_ms: float
    places: tuple[RolePlace, ...]
    cells: tuple[RoleCell, ...]
    handed_over: int
    reasons: tuple[ReasonRow, ...]


def roles_of(deployment: Deployment, now: datetime) -> Roles:
    places = DeploymentRegion.objects.filter(deployment=deployment).select_related("role_state").order_by("region_id")
    cells = list(_cells(deployment))
    ready: dict[str, list[CellRole]] = defaultdict(list)
    for cell in cells:
        if cell.state == CellState.READY:
            ready[cell.region_id].append(CellRole(cell.role))
    rows = [
        RolePlace(place, place.split, counted(ready[place.region_id]), getattr(place, "role_state", None))
        for place in places
    ]
    apart = [cell for cell in cells if cell.role != CellRole.MIXED]
    pairs = pairings(apart)
    shown = tuple(_role_cell(cell, pairs, now) for cell in apart)
    loads = [one.handovers for one in shown if one.handovers is not None]
    is_planned = deployment.plans_roles
    return Roles(
        deployment.name,
        len(deployment.instance_types) > 1,
        is_planned,
        deployment.scaling.get("itl_p99_ms", 50.0),
        tuple(row for row in rows if is_planned or row.place.prefill or row.ready.is_apart),
        shown,
        sum(load.handovers_total for load in loads),
        (*_reasons((load.fallbacks for load in loads), is_fallback=True), *_reasons(load.alone for load in loads)),
    )


def _cells(deployment: Deployment) -> Iterable[Cell]:
    live = Cell.objects.filter(deployment=deployment).exclude(state=CellState.STOPPED.value)
    return live.prefetch_related("members__node__report").order_by("region_id", "created_at", "id")


def _role_cell(cell: Cell, pairs: Pairings, now: datetime) -> RoleCell:
    leader = next((member for member in cell.members.all() if member.rank == 0), None)
    load = load_of(cell, report_of(leader.node), now) if leader else None
    if cell.role == CellRole.DECODE:
        named = tuple(one.cell for one in pairs.prefill_cells(cell.pk))
    else:
        named = pairs.decode_cells(cell.pk)
    return RoleCell(cell, pairs.layout(cell.pk), named, load.handovers if load else None)


def _reasons(counts: Iterable[Mapping[str, int]], *, is_fallback: bool = False) -> Iterable[ReasonRow]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return (ReasonRow(reason, count, is_fallback) for reason, count in total.most_common())
