"""What the autoscaler looks at and what it decides. Pure data."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from fleet.planning.autoscaling.policy import CellRange, ScalingPolicy


class ScalingRule(StrEnum):
    """What a decision follows from. The first eight ask for cells; the others bound or hold what was asked for."""

    UTILISATION = "utilisation"
    QUEUE = "queue"
    OBJECTIVE = "objective"
    AUTOPILOT = "autopilot"
    FORECAST = "forecast"
    PLAN = "plan"
    SCHEDULE = "schedule"
    MIN = "min"
    MAX = "max"
    BUDGET = "budget"
    AGREEMENT = "agreement"
    ROLLOUT = "rollout"
    UNKNOWN_LOAD = "unknown_load"


@dataclass(frozen=True, slots=True)
class PlaceLoad:
    """Requests at once of a deployment in a region: `in_flight` are worked on, `queued` wait for a cell, both as means
    of the last 15 s. `offered`: what all that arrive would be if none had to wait, by how long requests took while none
    did; `autopilot`: what the region autopilot sends there; `forecast`: what is expected once a cell that is decided on
    now is ready. None: nobody says.

    `service_s`: how long a request took while none had to wait. `late_burn`: how many times too fast late first tokens
    burn their budget over 5 minutes; `itl_p95_ms`: inter-token latency meanwhile. None: no request to judge by.
    """

    in_flight: float
    queued: float = 0.0
    offered: float | None = None
    service_s: float | None = None
    autopilot: float | None = None
    forecast: float | None = None
    late_burn: float | None = None
    itl_p95_ms: float | None = None

    @property
    def total(self) -> float:
        """Requests at once to have room for. A queue is what could not be served so far, and may be many times what
        would have to be served at once; what arrives may be many times that, too, where who is refused tries again. The
        lesser of both is not too little."""
        waiting = self.in_flight + self.queued
        return waiting if self.offered is None else max(self.in_flight, min(self.offered, waiting))


@dataclass(frozen=True, slots=True)
class NeedSample:
    """How many cells would have been enough at a moment, with some slack; of a span of time, the most of it."""

    at: datetime
    cells: int


@dataclass(frozen=True, slots=True)
class PlannedNeed:
    """What the plan of the day has there soon: the most cells of the slots until one that is ordered now has served
    for a slot, and of which slot and what for."""

    cells: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScaledPlace:
    """A region in which a deployment has a range. `current`: how many cells it should have, by the last decision or a
    person; in shadow, by the last decision alone. `ready` serve; `ready_for_s`: for how long the youngest of them has;
    None: none is. `load` None: nobody has reported it lately. `cell_price`: US dollars an hour there; 0: unknown.
    `planned` None: there is no plan, or it is too old."""

    region: str
    range: CellRange
    current: int
    ready: int
    ready_for_s: float | None
    load: PlaceLoad | None
    history: tuple[NeedSample, ...] = ()
    cell_price: float = 0.0
    planned: PlannedNeed | None = None


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


@dataclass(frozen=True, slots=True)
class PlaceDecision:
    """How many cells a place should have now, by which rule, and why in a sentence. `needed`: what its load alone takes
    at this moment, within the range; None: unknown. `history` is to be kept for the next look."""

    region: str
    wanted: int
    needed: int | None
    rule: ScalingRule
    reason: str
    history: tuple[NeedSample, ...]
