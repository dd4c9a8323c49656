"""Pages as they were: overview, cells, nodes and deployments at the time of `?at=`, from the recording, below a banner
with the time and the changes around it. Reads only."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db.models import Q

from controlplane.dashboard.fragments import Fragment, PageRequest, Past
from engine_agent.protocol.states import MemberRole
from fleet.faults.models import Incident
from fleet.reconcile.planning.states import CELL_TONE, NODE_TONE, ROLLOUT_TONE, CellState, NodeState
from fleet.recorder.planning.moments import Moment, PlaceThen
from fleet.recorder.planning.states_then import CellThen, NodeThen, RolloutThen
from fleet.recorder.selectors import Recording, recording_at
from kernel.ages import age_text
from kernel.refusals import InvalidInput
from kernel.time_ranges import parse_moment
from kernel.tones import Tone

ROWS_THEN = 100
SPARE = "spare"
NOTHING_THEN = "Nothing can be shown for this time."
SCRUBBED = timedelta(minutes=15)
"""How far the slider reaches to both sides."""


@dataclass(frozen=True, slots=True)
class Banner:
    """The time that a page shows, and the times that it can move to. `first` and `last`: ends of the slider."""

    at: datetime
    recording: Recording | None
    first: datetime
    last: datetime
    trouble: str = ""

    @property
    def before_text(self) -> str:
        """Just before the last recorded decisions."""
        before = self.recording.before if self.recording else None
        return (before - timedelta(milliseconds=1)).isoformat() if before else ""

    @property
    def after_text(self) -> str:
        """When the next decisions were applied."""
        after = self.recording.after if self.recording else None
        return after.isoformat() if after else ""

    @property
    def first_s(self) -> int:
        return int(self.first.timestamp())

    @property
    def at_s(self) -> int:
        return int(self.at.timestamp())

    @property
    def last_s(self) -> int:
        return int(self.last.timestamp())


@dataclass(frozen=True, slots=True)
class RowThen:
    """An object as it was. `age`: how long it had been in its state."""

    row: CellThen | NodeThen | RolloutThen
    tone: Tone
    age: str
    cell: str = ""


@dataclass(frozen=True, slots=True)
class ListThen:
    """`rows` is empty and `trouble` set if nothing is recorded."""

    rows: tuple[RowThen, ...]
    more: bool = False
    filtered: bool = False
    page: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """A deployment in a region. `toned`: states with their tones and numbers of cells."""

    deployment: str
    region: str
    ready: int
    wanted: int
    toned: tuple[tuple[str, Tone, int], ...]


@dataclass(frozen=True, slots=True)
class PlacesThen:
    rows: tuple[PlaceRow, ...]
    trouble: str = ""


def _recording(request: PageRequest) -> Recording | InvalidInput:
    try:
        at = parse_moment("at", request.text("at"))
    except InvalidInput as wrong:
        return wrong
    if at > request.now:
        return InvalidInput(field="at", rule="range", message=f"{at:%Y-%m-%d %H:%M:%S} UTC is in the future")
    return recording_at(at, request.now)


def _moment(request: PageRequest) -> Moment | None:
    found = request.once(_recording)
    return None if isinstance(found, InvalidInput) else found.moment


def _banner(request: PageRequest) -> Banner:
    found = request.once(_recording)
    if isinstance(found, InvalidInput):
        return Banner(request.now, None, request.now - SCRUBBED, request.now, f"{found}.")
    last = min(request.now, found.at + SCRUBBED)
    return Banner(found.at, found, found.at - SCRUBBED, last, found.trouble)


def _rows_then(request: PageRequest, rows: list[RowThen], filtered: bool) -> ListThen:
    first = (request.page - 1) * ROWS_THEN
    shown = tuple(rows[first : first + ROWS_THEN])
    return ListThen(shown, more=len(rows) > first + ROWS_THEN, filtered=filtered, page=request.page)


def _cells_then(request: PageRequest) -> ListThen:
    """The list of cells with its filters."""
    if (moment := request.once(_moment)) is None:
        return ListThen((), trouble=NOTHING_THEN)
    wanted = {name: request.text(name) for name in ("deployment", "region", "state", "q")}
    cells = [
        RowThen(cell, CELL_TONE[cell.state], _age(cell.state_since, moment.at))
        for cell in moment.cells
        if wanted["deployment"] in {"", cell.deployment}
        and wanted["region"] in {"", cell.region}
        and wanted["state"] in {"", cell.state}
        and (wanted["q"].lower() in cell.id.lower() or wanted["q"].lower() in cell.reason.lower())
    ]
    return _rows_then(request, cells, any(wanted.values()))


def _broken_then(request: PageRequest) -> ListThen:
    """Cells that were not ready."""
    if (moment := request.once(_moment)) is None:
        return ListThen((), trouble=NOTHING_THEN)
    rows = [
        RowThen(cell, CELL_TONE[cell.state], _age(cell.state_since, moment.at))
        for cell in moment.cells
        if cell.state is not CellState.READY
    ]
    return _rows_then(request, rows, False)


def _nodes_then(request: PageRequest) -> ListThen:
    if (moment := request.once(_moment)) is None:
        return ListThen((), trouble=NOTHING_THEN)
    member_of = {member.node: (cell.id, member.rank) for cell in moment.cells for member in cell.members}
    wanted = {name: request.text(name) for name in ("region", "state", "role", "q")}

    def is_shown(node: NodeThen, cell: str, rank: int | None) -> bool:
        role = SPARE if rank is None else MemberRole.FOLLOWER if rank else MemberRole.LEADER
        return (
            wanted["region"] in {"", node.region}
            and (wanted["state"] == node.state or (not wanted["state"] and node.state is not NodeState.RETIRED))
            and wanted["role"] in {"", role}
            and (wanted["q"].lower() in node.id.lower() or wanted["q"].lower() in cell.lower())
        )

    places = ((node, *member_of.get(node.id, ("", None))) for node in moment.nodes)
    nodes = [
        RowThen(node, NODE_TONE[node.state], _age(node.state_since, moment.at), cell)
        for node, cell, rank in places
        if is_shown(node, cell, rank)
    ]
    return _rows_then(request, nodes, any(wanted.values()))


def _places_then(request: PageRequest) -> PlacesThen:
    if (moment := request.once(_moment)) is None:
        return PlacesThen((), NOTHING_THEN)
    return PlacesThen(tuple(map(_place_row, moment.places())))


def _place_row(place: PlaceThen) -> PlaceRow:
    toned = tuple((state.value, CELL_TONE[state], count) for state, count in sorted(place.states.items()))
    return PlaceRow(place.deployment, place.region, place.ready, place.wanted, toned)


def _rollouts_then(request: PageRequest) -> ListThen:
    if (moment := request.once(_moment)) is None:
        return ListThen((), trouble=NOTHING_THEN)
    rows = (RowThen(one, ROLLOUT_TONE[one.state], _age(one.state_since, moment.at)) for one in moment.rollouts)
    return ListThen(tuple(rows))


def _incidents_then(request: PageRequest) -> tuple[Incident, ...]:
    """Incidents that were open, from their rows."""
    found = request.once(_recording)
    if isinstance(found, InvalidInput):
        return ()
    open_then = Q(closed_at=None) | Q(closed_at__gt=found.at)
    return tuple(Incident.objects.filter(open_then, opened_at__lte=found.at, shadow=False)[:ROWS_THEN])


def _age(since: datetime, at: datetime) -> str:
    return age_text((at - since).total_seconds())


BANNER = Fragment("past", "", (), "fleet/recorder/past.html", _banner)
_PLACES = Fragment("places-then", "Deployments", (), "fleet/recorder/places.html", _places_then)
PAST_CELLS = Past(BANNER, (Fragment("cells-then", "", (), "fleet/recorder/cells.html", _cells_then),))
PAST_NODES = Past(BANNER, (Fragment("nodes-then", "", (), "fleet/recorder/nodes.html", _nodes_then),))
PAST_DEPLOYMENTS = Past(BANNER, (replace(_PLACES, title=""),))
PAST_OVERVIEW = Past(
    BANNER,
    (
        _PLACES,
        Fragment("incidents-then", "Open incidents", (), "fleet/recorder/incidents.html", _incidents_then),
        Fragment("rollouts-then", "Rollouts under way", (), "fleet/recorder/rollouts.html", _rollouts_then),
        Fragment("broken-then", "Cells that were not ready", (), "fleet/recorder/cells.html", _broken_then),
    ),
)
