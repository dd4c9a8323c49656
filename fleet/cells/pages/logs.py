"""The page of a cell's logs: one log of one member, searched and filtered by level, and its download. Reading it makes
the member's agent send its last lines."""

import re
from dataclasses import dataclass

from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from fleet.cells.api import SOURCES
from fleet.cells.models import Cell
from fleet.nodes.selectors import NodeLines, cell_log_lines
from fleet.nodes.services.reports import node_logs_request
from kernel import clock
from kernel.access import Role, require
from kernel.tones import Tone

LEVELS = {"error": 2, "warning": 1, "info": 0}
"""Names in the filter -> rank. A line without a level has that of the line before: a traceback belongs to its error."""
LEVEL_TONE = {2: Tone.BAD, 1: Tone.WARN, 0: Tone.IDLE}
_LEVEL = re.compile(
    r"\b(?:(?P<error>ERROR|CRITICAL|FATAL|Traceback)|(?P<warning>WARN(?:ING)?)|(?P<info>INFO|DEBUG|TRACE))\b"
    r'|"level": ?"(?:(?P<json_error>error|critical|fatal)|(?P<json_warning>warn(?:ing)?)|(?P<json_info>info|debug))"'
)
_SEARCHED_CHARS = 200
"""A level stands at the beginning of a line."""


@dataclass(frozen=True, slots=True)
class LogLine:
    text: str
    rank: int

    @property
    def tone(self) -> str:
        return LEVEL_TONE[self.rank].value


@dataclass(frozen=True, slots=True)
class LogView:
    """Lines of one log, oldest first. `total`: lines without the filter. `node` None: the cell has no nodes."""

    cell: str
    nodes: tuple[NodeLines, ...]
    node: NodeLines | None
    source: str
    lines: tuple[LogLine, ...]
    total: int

    @property
    def filename(self) -> str:
        return f"{self.cell}-{self.node.node if self.node else 'none'}-{self.source}.log"


def levelled(lines: list[str]) -> list[LogLine]:
    found, rank = [], 0
    for line in lines:
        if match := _LEVEL.search(line[:_SEARCHED_CHARS]):
            rank = LEVELS[str(match.lastgroup).removeprefix("json_")]
        found.append(LogLine(line, rank))
    return found


def log_view(*, cell: str, node: str, source: str, level: str, text: str) -> LogView:
    """The leader's engine log, unless others are named. Two queries; 404 without the cell."""
    found_or_404(Cell.objects.filter(pk=cell).first(), f"cell {cell!r}")
    nodes = cell_log_lines(cell)
    chosen = next((one for one in nodes if one.node == node), nodes[0] if nodes else None)
    name = source if source in SOURCES else SOURCES[0]
    lines = levelled(chosen.logs.get(name, [])) if chosen else []
    least, wanted = LEVELS.get(level, 0), text.casefold()
    shown = tuple(line for line in lines if line.rank >= least and wanted in line.text.casefold())
    return LogView(cell, nodes, chosen, name, shown, len(lines))


def _view_of(key: str, values: PageRequest) -> LogView:
    names = ("node", "source", "level")
    node, source, level = (values.text(name) for name in names)
    return log_view(cell=key, node=node, source=source, level=level, text=values.text("q"))


def _logs(request: PageRequest) -> LogView:
    view = _view_of(request.key, request)
    if view.node is not None:
        node_logs_request(nodes=[view.node.node], now=request.now)
    return view


def _filter(request: PageRequest) -> Filter:
    nodes = cell_log_lines(request.key)
    members = [(one.node, f"{one.role} {one.rank or ''} {one.node}".replace("  ", " ")) for one in nodes]
    levels = (("", "every level"), ("warning", "warnings and errors"), ("error", "errors"))
    choices = (
        choose_labelled(request, "node", members or [("", "no node")]),
        choose_labelled(request, "source", [(name, name) for name in SOURCES]),
        choose_labelled(request, "level", levels),
    )
    return Filter(text_label="Search these lines", text_name="q", text=request.text("q"), choices=choices)


CELL_LOGS = Page(
    section="cells",
    title="Logs",
    fragments=(Fragment("cell-log", "", ("logs",), "fleet/cells/logs.html", _logs),),
    narrow=_filter,
)


@never_cache
@require_safe
def cell_log_download(request: HttpRequest, key: str) -> HttpResponse:
    """The same lines as a text file."""
    if not request.user.is_authenticated:
        return redirect_to_login(request.get_full_path())
    require(request, Role.VIEWER)
    view = _view_of(key, PageRequest(key, request.GET, clock.now()))
    text = "".join(f"{line.text}\n" for line in view.lines)
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    response.headers["Content-Disposition"] = f'attachment; filename="{view.filename}"'
    return response
