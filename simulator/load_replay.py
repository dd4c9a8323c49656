"""A load for a deployment of a simulated fleet, how its cells serve it, and a scaler that follows it. The load is a
fluid: requests arrive at a rate, each takes some time, and those without a free place wait or are refused. That is
coarse, but sufficient for the number of cells. Cells come and go as the live planners decide: machines boot, engines
load, drains wait for the budget."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import fmean
from typing import Protocol

from fleet.autoscaling.planning.needs import (
    OBJECTIVE_SEEN_S,
    NeedSample,
    PlaceLoad,
    PlannedNeed,
    ScaledPlace,
    ScalingView,
)
from fleet.autoscaling.planning.planner import plan_scaling
from fleet.autoscaling.planning.policy import CellRange, ScalingPolicy
from fleet.deployments.planner import Objective, RequestCounts, late_burn
from fleet.reconcile.planning.states import CellState, NodeState
from simulator.fault_injection import scale
from simulator.world import Place, World

MEANS_S = 15.0
"""Loads are means over this time, like those that ingresses report (`traffic.region_shares.planning.load`)."""
MINUTE_S = 60.0
LOST_MINUTE = "minute.lost"
UTILISATION_CAP = 0.8
"""The default of the region autopilot."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How cells serve a load: each works on `per_cell` concurrent requests, for `service_s` each. `waiting_per_cell`
    requests may wait for `wait_s`, like real-time requests at an ingress."""

    per_cell: float
    service_s: float
    waiting_per_cell: float = 64.0
    wait_s: float = 10.0
    objective: Objective = field(default_factory=Objective)


@dataclass
class Course:
    """The outcome so far. Requests are a fluid; `machine_s` counts all machines of the fleet, including spares and
    booting ones. A minute is lost if more requests are late or refused than the objective allows."""

    seconds: float = 0.0
    arrived: float = 0.0
    late: float = 0.0
    refused: float = 0.0
    cell_s: float = 0.0
    machine_s: float = 0.0
    minutes_lost: int = 0
    changes: int = 0
    turns: int = 0
    most: int = 0


class Scaler(Protocol):
    """Returns how many cells a place should have."""

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        """Called at each interval, in order of time; it may keep state."""
        ...


@dataclass
class PolicyScaler:
    """The live planner. `forecast`: the expected load, in concurrent requests, one start-up after a time; `planned`:
    the load of a plan then."""

    policy: ScalingPolicy
    per_cell: float
    start_up_s: float
    forecast: Callable[[datetime], float] | None = None
    planned: Callable[[datetime], PlannedNeed | None] | None = None
    _history: tuple[NeedSample, ...] = ()

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        load = place.load
        if load is not None and self.forecast is not None:
            load = replace(load, forecast=self.forecast(now))
        planned = self.planned(now) if self.planned is not None else None
        view = ScalingView(
            deployment="replayed",
            policy=self.policy,
            per_cell=self.per_cell,
            utilisation_cap=UTILISATION_CAP,
            start_up_s=self.start_up_s,
            places=(replace(place, load=load, history=self._history, planned=planned),),
        )
        (decision,) = plan_scaling(view, now)
        self._history = decision.history
        return decision.wanted


class LoadReplay:
    """Applies a load to one place of a world from its first second. `rate`: requests per second by the second of the
    run; `course` is the outcome so far."""

    def __init__(
        self,
        world: World,
        place: Place,
        rate: Callable[[float], float],
        scaler: Scaler,
        *,
        serving: Serving,
        cells: CellRange,
        look_every_s: float = 5.0,
    ) -> None:
        self.course = Course()
        self._world = world
        self._place = place
        self._rate = rate
        self._scaler = scaler
        self._serving = serving
        self._range = cells
        self._every_s = look_every_s
        self._queued = 0.0
        self._loads: deque[tuple[float, float, float]] = deque(maxlen=max(1, round(MEANS_S / look_every_s)))
        self._judged: deque[RequestCounts] = deque(maxlen=max(1, round(OBJECTIVE_SEEN_S / look_every_s)))
        self._minute = (0.0, 0.0)
        self._last_step = 0
        world.queue.at(0.0, self._poll)

    @property
    def working(self) -> float:
        """Concurrent requests that cells worked on in the last interval."""
        return self._loads[-1][0] if self._loads else 0.0

    def _poll(self) -> None:
        queue = self._world.queue
        self._serve(self._rate(queue.now_s))
        self._count()
        before = self._world.store.deployments[self._place[0]].claim(self._place[1]).asked
        wanted = self._scaler.wanted(self._scaled_place(before), queue.now)
        if wanted != before:
            self._record_step(wanted - before)
            scale(self._world, *self._place, wanted)
        self.course.most = max(self.course.most, wanted)
        queue.after(self._every_s, self._poll)

    def _serve(self, rate: float) -> None:
        """Serves one interval: requests beyond the capacity wait or are refused."""
        serving, seconds = self._serving, self._every_s
        ready = self._world.ready[self._place]
        per_s = ready * serving.per_cell / serving.service_s
        arrived = rate * seconds
        served = min(self._queued + arrived, per_s * seconds)
        room = min(ready * serving.waiting_per_cell, per_s * serving.wait_s)
        waiting = self._queued + arrived - served
        refused = max(0.0, waiting - room)
        self._queued = waiting - refused
        waits_s = self._queued / per_s if per_s else 0.0
        late = min(arrived - min(refused, arrived), served) if waits_s * 1000 > serving.objective.ttft_ms else 0.0
        self._loads.append((served / seconds * serving.service_s, self._queued, rate * serving.service_s))
        self._decide(arrived, late, refused)

    def _decide(self, arrived: float, late: float, refused: float) -> None:
        course = self.course
        course.arrived += arrived
        course.late += late
        course.refused += refused
        self._judged.append(RequestCounts(round(1000 * arrived), round(1000 * refused), round(1000 * late)))
        bad, of = self._minute
        self._minute = (bad + late + refused, of + arrived)
        if (self._world.queue.now_s + self._every_s) % MINUTE_S < self._every_s:
            bad, of = self._minute
            if bad > (1 - self._serving.objective.ttft_share) * of:
                course.minutes_lost += 1
                self._world.context.note(LOST_MINUTE, self._place[0], f"{bad:.0f} of {of:.0f} requests late or refused")
            self._minute = (0.0, 0.0)

    def _count(self) -> None:
        store, seconds = self._world.store, self._every_s
        cells = [cell for cell in store.cells.values() if (cell.deployment, cell.region) == self._place]
        self.course.seconds += seconds
        self.course.cell_s += seconds * sum(bool(cell.members) for cell in cells if cell.state is not CellState.STOPPED)
        self.course.machine_s += seconds * sum(node.state is not NodeState.RETIRED for node in store.nodes.values())

    def _scaled_place(self, current: int) -> ScaledPlace:
        cells = self._world.store.cells.values()
        ready = [one for one in cells if (one.deployment, one.region) == self._place and one.state is CellState.READY]
        youngest = max((one.state_since for one in ready), default=None)
        counts = list(self._judged)
        total = RequestCounts(
            sum(c.requests for c in counts), sum(c.errors for c in counts), sum(c.slow for c in counts)
        )
        return ScaledPlace(
            region=self._place[1],
            range=self._range,
            current=current,
            ready=len(ready),
            ready_for_s=(self._world.queue.now - youngest).total_seconds() if youngest else None,
            load=PlaceLoad(
                in_flight=fmean(working for working, *_ in self._loads),
                queued=fmean(waiting for _, waiting, _ in self._loads),
                offered=fmean(offered for *_, offered in self._loads),
                service_s=self._serving.service_s,
                late_burn=late_burn(self._serving.objective, total),
            ),
        )

    def _record_step(self, step: int) -> None:
        direction = 1 if step > 0 else -1
        self.course.changes += 1
        self.course.turns += self._last_step == -direction
        self._last_step = direction
