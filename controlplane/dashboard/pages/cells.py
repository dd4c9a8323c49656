"""The list of cells and the page of one cell."""

from django.http import Http404

from controlplane.dashboard.fragments import Asked, Filter, Fragment, Page
from controlplane.dashboard.pages.choices import choose_deployment, choose_region, choose_state
from controlplane.dashboard.selectors.cell_asks import CellAsks, cell_asks
from controlplane.dashboard.selectors.cells import (
    CellList,
    CellRow,
    Stack,
    cell_find,
    cell_list,
    cell_stack,
)
from controlplane.dashboard.selectors.events import EventList, cell_events
from controlplane.dashboard.selectors.load_charts import LoadCharts, load_charts
from fleet.planning.states import CellState
from fleet.selectors.history import cell_subject
from fleet.selectors.node_log import NodeLines, cell_log_lines
from fleet.services.node_log import node_logs_request

EVENTS_OF_ONE_CELL = 30


def _list(asked: Asked) -> CellList:
    return cell_list(
        now=asked.now,
        deployment=asked.word("deployment"),
        region=asked.word("region"),
        state=asked.word("state"),
        text=asked.word("q"),
        page=asked.page,
    )


def _filter(asked: Asked) -> Filter:
    choices = (choose_deployment(asked), choose_region(asked), choose_state(asked, CellState, "every live state"))
    return Filter(text_label="Find by name or reason", text_name="q", text=asked.word("q"), choices=choices)


def _cell(asked: Asked) -> CellRow:
    row = cell_find(cell_id=asked.key, now=asked.now)
    if row is None:
        raise Http404(f"There is no cell {asked.key!r}.")
    return row


def _stack(asked: Asked) -> Stack:
    return cell_stack(asked.once(_cell))


def _asks(asked: Asked) -> CellAsks:
    return cell_asks(asked.once(_cell), asked.now)


def _load(asked: Asked) -> LoadCharts:
    return load_charts(cell_subject(asked.key), span=asked.word("span"), now=asked.now)


def _logs(asked: Asked) -> tuple[NodeLines, ...]:
    """Looking at them is what makes agents send them; nothing else is asked of anybody."""
    lines = cell_log_lines(asked.key)
    node_logs_request(nodes=[node.node for node in lines], now=asked.now)
    return lines


def _events(asked: Asked) -> EventList:
    return cell_events(asked.key, EVENTS_OF_ONE_CELL)


CELLS = Page(
    section="cells",
    title="Cells",
    fragments=(Fragment("cells-table", "", ("cells", "load"), "dashboard/cells/table.html", _list),),
    narrow=_filter,
)

CELL = Page(
    section="cells",
    title="",
    fragments=(
        Fragment("cell", "", ("cells:{key}", "nodes", "load"), "dashboard/cells/cell.html", _cell),
        Fragment("cell-asks", "What you can do", ("cells:{key}",), "dashboard/cells/asks.html", _asks),
        Fragment("cell-load", "Load", ("history",), "dashboard/load/charts.html", _load),
        Fragment("cell-probes", "Probes", ("cells:{key}", "load"), "dashboard/cells/probes.html", _cell),
        Fragment("cell-stack", "Stack", ("cells:{key}", "nodes"), "dashboard/cells/stack.html", _stack),
        Fragment("cell-events", "Events", ("events",), "dashboard/events/list.html", _events),
        Fragment("cell-logs", "Last lines", ("logs",), "dashboard/cells/logs.html", _logs),
    ),
    charts=True,
)
