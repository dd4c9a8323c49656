"""What the autoscaler looks at and what it decides. Pure data."""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from fleet.planning.autoscaling.policy import CellRange, ScalingPolicy


class ScalingRule(StrEnum):
    """What a decision follows from. Those from `max` on bound or hold what the others ask for."""

    UTILISATION = "utilisation"
    QUEUE = "queue"
    OBJECTIVE = "objective"
    AUTOPILOT = "autopilot"
    FORECAST = "forecast"
    PLAN = "plan"
    ROLES = "roles"
    WAITING = "waiting"
    BACKLOG = "backlog"
    ARRIVALS = "arrivals"
    SCHEDULE = "schedule"
    MIN = "min"
    MAX = "max"
    BUDGET = "budget"
    IDLE = "idle"
    AGREEMENT = "agreement"
    ROLLOUT = "rollout"
    UNKNOWN_LOAD = "unknown_load"


@dataclass(frozen=True, slots=True)
class PlaceLoad:
    """Requests at once of a deployment in a region: `in_flight` are worked on, `queued` wait for a cell, both as means
    of the last 15 s. `offered`: what all that arrive would be if none had to wait, by how long requests took while none
    did; `autopilot`: what the region autopilot sends there; `forecast`: what is expected, at p90, until a cell that is
    decided on next is ready. None: nobody says.

    `service_s`: how long a request took while none had to wait. `late_burn`: how many times too fast late first tokens
    burn their budget over 5 minutes; `itl_p95_ms`: inter-token latency meanwhile. None: no request to judge by.

    `held` requests wait for a first cell at this moment, and are among those that wait; `arrivals_per_s` come for the
    cells here; `elsewhere` are those of this region's applications that other regions serve, at once. `backlog`:
    requests at once by which what batches and near-real-time requests queue, `backlog_requests`, is done in time.
    """

    in_flight: float
    queued: float = 0.0
    offered: float | None = None
    service_s: float | None = None
    autopilot: float | None = None
    forecast: float | None = None
    late_burn: float | None = None
    itl_p95_ms: float | None = None
    held: float = 0.0
    arrivals_per_s: float = 0.0
    elsewhere: float = 0.0
    backlog: float = 0.0
    backlog_requests: float = 0.0

    @property
    def total(self) -> float:
        """Requests at once to have room for. A queue is what could not be served so far, and may be many times what
        would have to be served at once; what arrives may be many times that, too, where who is refused tries again. The
        lesser of both is not too little."""
        waiting = self.in_flight + max(self.queued, self.held)
        return waiting if self.offered is None else max(self.in_flight, min(self.offered, waiting))


@dataclass(frozen=True, slots=True)
class NeedSample:
    """How many cells would have been enough at a moment, with some slack; of a span of time, the most of it."""

    at: datetime
    cells: int


@dataclass(frozen=True, slots=True)
class PlannedNeed:
    """What the plan of the day has there soon: the most cells of the slots until one that is ordered now has served
    for a slot, and of which slot and what for. `enough`: the most until some time later, if
    that is more; there are not fewer before."""

    cells: int
    reason: str
    enough: int = 0


@dataclass(frozen=True, slots=True)
class ScaledPlace:
    """A region in which a deployment has a range. `current`: how many cells it should have, by the last decision or a
    person; in shadow, by the last decision alone. `ready` serve; `ready_for_s`: for how long the youngest of them has;
    None: none is. `load` None: nobody has reported it lately. `cell_price`: US dollars an hour there; 0: unknown.
    `planned` None: there is no plan, or it is too old. `idle_since`: since when nobody has asked, by the look before;
    None: somebody did. `granted`: how many cells it may have while machines are short, and why; None: all.
    `answering`: which part of its cells should answer requests, where others only read prompts; `roles`: how many cells
    the planner of roles needs of both; None: it plans none apart. `capacities`: requests at once of its cells, in the
    order in which they stay and others come, the last also of all further ones; none: all as the deployment's."""

    region: str
    range: CellRange
    current: int
    ready: int
    ready_for_s: float | None
    load: PlaceLoad | None
    history: tuple[NeedSample, ...] = ()
    cell_price: float = 0.0
    planned: PlannedNeed | None = None
    idle_since: datetime | None = None
    granted: int | None = None
    grant_reason: str = ""
    answering: float = 1.0
    roles: PlannedNeed | None = None
    capacities: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalingView:
    """A deployment whose cells are a range somewhere. `per_cell`: requests at once that a cell was tested for;
    `utilisation_cap`: to which share of that the region autopilot fills; `start_up_s`: from a decision until the cell
    is ready; `elsewhere_price`: US dollars an hour for the cells that it has where no range is."""

    deployment: str
    policy: ScalingPolicy
    per_cell: float
    utilisation_cap: float
    start_up_s: float
    places: tuple[ScaledPlace, ...]
    elsewhere_price: float = 0.0
    is_rolling: bool = False
    is_full_elsewhere: bool = True
    """Cells where no range is have no room for more, or there are none."""
    crowded_out: frozenset[str] = frozenset()
    """Regions whose requests no other one has room for: for the planner to fill in."""
    capacities: tuple[float, ...] = ()
    """As of the place that is looked at: what its cells carry one by one, where they are not alike."""

    def at(self, place: ScaledPlace) -> "ScalingView":
        """With what the cells of a place carry, where only a part of them answers, or they are of several types;
        `per_cell` is then the mean of those that there should be."""
        if not place.capacities:
            return replace(self, per_cell=self.per_cell * place.answering)
        count = max(1, place.current)
        mean = sum(self.carried(count, place.capacities)) / count
        return replace(self, per_cell=mean, capacities=place.capacities)

    @staticmethod
    def carried(count: int, capacities: tuple[float, ...]) -> tuple[float, ...]:
        """What so many cells carry, one by one."""
        return (*capacities[:count], *[capacities[-1]] * (count - len(capacities)))


@dataclass(frozen=True, slots=True)
class PlaceDecision:
    """How many cells a place should have now, by which rule, and why in a sentence. `needed`: what its load alone takes
    at this moment, within the range; None: unknown. `history` and `idle_since` are to be kept for the next look."""

    region: str
    wanted: int
    needed: int | None
    rule: ScalingRule
    reason: str
    history: tuple[NeedSample, ...]
    idle_since: datetime | None = None
