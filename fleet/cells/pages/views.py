"""The list of cells, and the page of one cell with its actions. Services decide."""

from collections.abc import Collection
from datetime import datetime

from django.shortcuts import get_object_or_404
from django.urls import reverse

from controlplane.dashboard.actions import WHY, Action, ActionMenu, Submission, Target, action_menu, action_view
from controlplane.dashboard.charts import Marker
from controlplane.dashboard.choices import choose_deployment, choose_region, choose_state
from controlplane.dashboard.events import EventList, cell_events, chart_markers
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, deferred, found_or_404
from fleet.cells.models import Cell
from fleet.cells.pages.data import (
    CELL_LIST,
    CellRow,
    Stack,
    cell_find,
    cell_stack,
    drain_effect,
    restart_effect,
)
from fleet.cells.pages.siblings import Siblings, siblings_of
from fleet.cells.services import DRAINABLE, RESTARTABLE, cell_drain, cell_restart
from fleet.load.pages import Charts, load_charts, member_charts
from fleet.load.selectors import cell_subject
from fleet.machines.pages.views import CellMachines, cell_machines
from fleet.reconcile.planning.states import CellState
from fleet.recorder.pages.past import PAST_CELLS
from fleet.recorder.pages.why import time_line_fragment, why_fragment
from fleet.recorder.planning.reasons import Subject
from fleet.requests.pages import Place, request_fragments
from kernel.time_ranges import OF_LOAD

EVENTS_OF_ONE_CELL = 30


def _cell_filter(request: PageRequest) -> Filter:
    choices = (choose_deployment(request), choose_region(request), choose_state(request, CellState, "every live state"))
    return Filter(text_label="Find by name or reason", text_name="q", text=request.text("q"), choices=choices)


def _cell(request: PageRequest) -> CellRow:
    return found_or_404(cell_find(cell_id=request.key, now=request.now), f"cell {request.key!r}")


def _cell_software(request: PageRequest) -> Stack:
    return cell_stack(request.once(_cell))


def _machines_of_cell(request: PageRequest) -> CellMachines:
    return cell_machines(request.once(_cell), request.now)


def _cell_actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_cell).cell, request.caller.access, *CELL_ACTIONS)


def _siblings(request: PageRequest) -> Siblings:
    return siblings_of(request.once(_cell), request.span, request.now)


def _requests_of_cell(request: PageRequest) -> Place:
    return Place(request.span, cell=request.key)


def _cell_load_charts(request: PageRequest) -> Charts:
    markers = request.once(_markers)
    return load_charts(cell_subject(request.key), span=request.span, now=request.now, markers=markers)


def _markers(request: PageRequest) -> tuple[Marker, ...]:
    return chart_markers(request.span, deployment=request.once(_cell).cell.deployment_id, cell=request.key)


def _member_charts(request: PageRequest) -> Charts:
    nodes = [member.node.pk for member in request.once(_cell).members]
    return member_charts(nodes, span=request.span, now=request.now, markers=request.once(_markers))


def _events_of_cell(request: PageRequest) -> EventList:
    return cell_events(request.key, EVENTS_OF_ONE_CELL)


CELLS = Page(
    section="cells",
    title="Cells",
    fragments=(Fragment("cells-table", "", ("cells", "load"), "fleet/cells/table.html", CELL_LIST.page),),
    narrow=_cell_filter,
    past=PAST_CELLS,
    lists=(CELL_LIST,),
)

CELL = Page(
    section="cells",
    title="",
    fragments=(
        Fragment("cell", "", ("cells:{key}", "nodes", "load"), "fleet/cells/cell.html", _cell),
        time_line_fragment(Subject.CELL),
        why_fragment(Subject.CELL),
        *deferred(
            Fragment("cell-load", "Load", ("history",), "fleet/load/charts.html", _cell_load_charts),
            Fragment("cell-use", "Accelerators and machines", ("history",), "fleet/load/charts.html", _member_charts),
            Fragment("cell-siblings", "Beside its siblings", ("history",), "fleet/cells/siblings.html", _siblings),
            *request_fragments(_requests_of_cell),
            Fragment("cell-probes", "Probes", ("cells:{key}", "load"), "fleet/cells/probes.html", _cell),
            Fragment(
                "cell-machines",
                "Machines",
                ("cells:{key}", "machines", "nodes"),
                "fleet/machines/cell.html",
                _machines_of_cell,
            ),
            Fragment("cell-stack", "Stack", ("cells:{key}", "nodes"), "fleet/cells/stack.html", _cell_software),
            Fragment("cell-events", "Events", ("events",), "dashboard/events/list.html", _events_of_cell),
        ),
    ),
    actions=_cell_actions,
    charts=True,
    ranges=OF_LOAD,
)


def _find(cell_id: str) -> Cell:
    return get_object_or_404(Cell, pk=cell_id)


def _drain(form: Submission, cell: Cell) -> None:
    cell_drain(cell_id=cell.pk, actor=form.actor, now=form.now, why=form.text("why"))


def _restart(form: Submission, cell: Cell) -> None:
    cell_restart(cell_id=cell.pk, actor=form.actor, now=form.now, why=form.text("why"))


def _row(cell: Cell, now: datetime) -> CellRow:
    return found_or_404(cell_find(cell_id=cell.pk, now=now), f"cell {cell.pk!r}")


def _unless(cell: Cell, allowed: Collection[CellState], done: str) -> str:
    state = CellState(cell.state)
    return "" if state in allowed else f"A cell that is {state} cannot be {done}."


TARGET = Target(
    noun="cell",
    find=_find,
    name=lambda cell: cell.pk,
    url=lambda cell: reverse("cell", args=(cell.pk,)),
    deployment=lambda cell: cell.deployment_id,
    action_url=lambda cell, name: reverse("cell-action", args=(cell.pk, name)),
)
CELL_ACTIONS = (
    Action(
        target=TARGET,
        name="drain",
        label="Drain",
        run=_drain,
        typed=TARGET.name,
        fields=(WHY,),
        effect=lambda cell, now: drain_effect(_row(cell, now), now),
        why_not=lambda cell: _unless(cell, DRAINABLE, "drained"),
    ),
    Action(
        target=TARGET,
        name="restart",
        label="Restart",
        run=_restart,
        typed=TARGET.name,
        fields=(WHY,),
        effect=lambda cell, now: restart_effect(_row(cell, now), now),
        why_not=lambda cell: _unless(cell, RESTARTABLE, "restarted"),
    ),
)
cell_action = action_view(*CELL_ACTIONS)
