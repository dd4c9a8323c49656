"""The replay of `bench.capacity_plan --quick`: the planners alone. Cells start within a start-up, machines come and go
with them and stay for five minutes, and there is no fleet. It takes a third of the processor time of the fleet's
simulation, for trying what a setting is worth."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from bench.autoscaling import BOOT_SHARE, NODES, SERVICE_S, Load
from bench.capacity_policies import FILL, LOOK_S, PEAK_CELLS, Batches
from fleet.planning.autoscaling.policy import CellRange
from fleet.planning.autoscaling.view import PlaceLoad, ScaledPlace
from fleet.planning.forecast.series import SLOT_S
from fleet.planning.load.slo import Objective, RequestCounts, late_burn
from simulator.clock import EPOCH
from simulator.load_replay import Course, Scaler

SPREAD = 1.05
"""Of a start-up: as long as one takes in the fleet's simulation, in the mean."""
KEPT_S = 300.0
WAIT_S = 10.0
OBJECTIVE = Objective()


@dataclass
class Place:
    """A deployment's cells and what became of its requests. `starting`: when each of these cells is ready."""

    load: Load
    per_cell: float
    scaler: Scaler
    wanted: int
    ready: int
    start_up_s: float
    course: Course = field(default_factory=Course)
    since: datetime = EPOCH
    starting: list[float] = field(default_factory=list)
    waiting: float = 0.0
    working: float = 0.0
    judged: deque[RequestCounts] = field(default_factory=lambda: deque(maxlen=10))
    minute: tuple[float, float] = (0.0, 0.0)
    last: int = 0

    def serve(self, now_s: float) -> None:
        """One look's time, as `simulator.load_replay` has it."""
        rate, per_s = self.load.rate(now_s), self.ready * self.per_cell / SERVICE_S
        arrived = rate * LOOK_S
        served = min(self.waiting + arrived, per_s * LOOK_S)
        left = self.waiting + arrived - served
        refused = max(0.0, left - min(self.ready * self.per_cell / 4, per_s * WAIT_S))
        self.waiting = left - refused
        is_late = per_s > 0 and self.waiting / per_s * 1000 > OBJECTIVE.ttft_ms
        late = min(arrived - min(refused, arrived), served) if is_late else 0.0
        self.working = served / LOOK_S * SERVICE_S
        course = self.course
        course.arrived, course.refused, course.late = (
            course.arrived + arrived, course.refused + refused, course.late + late,
        )  # fmt: skip
        course.cell_s += LOOK_S * (self.ready + len(self.starting))
        self.judged.append(RequestCounts(round(1000 * arrived), round(1000 * refused), round(1000 * late)))
        bad, of = self.minute
        self.minute = (bad + late + refused, of + arrived)
        if (now_s + LOOK_S) % 60.0 < LOOK_S:
            course.minutes_lost += self.minute[0] > (1 - OBJECTIVE.ttft_share) * self.minute[1]
            self.minute = (0.0, 0.0)

    def seen(self, now_s: float) -> ScaledPlace:
        now, counts = EPOCH + timedelta(seconds=now_s), list(self.judged)
        total = RequestCounts(
            sum(c.requests for c in counts), sum(c.errors for c in counts), sum(c.slow for c in counts)
        )
        return ScaledPlace(
            region="east",
            range=CellRange(1, 3 * PEAK_CELLS),
            current=self.wanted,
            ready=self.ready,
            ready_for_s=(now - self.since).total_seconds(),
            load=PlaceLoad(
                self.working,
                self.waiting,
                offered=self.load.rate(now_s) * SERVICE_S,
                service_s=SERVICE_S,
                late_burn=late_burn(OBJECTIVE, total),
            ),
        )

    def change(self, step: int, now_s: float, free: deque[float]) -> None:
        """Start or stop cells. `free`: since when the machines of a cell are."""
        direction = 1 if step > 0 else -1
        self.course.changes += 1
        self.course.turns += self.last == -direction
        self.last = direction
        for _ in range(step):
            took_s = self.start_up_s * (1 - BOOT_SHARE) if free else self.start_up_s
            if free:
                free.popleft()
            self.starting.append(now_s + SPREAD * took_s)
        for _ in range(-step):
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1
            free.append(now_s)
        self.wanted += step

    def begin(self, now_s: float) -> None:
        """Cells that are ready by now."""
        for ready_s in [one for one in sorted(self.starting) if one <= now_s]:
            self.starting.remove(ready_s)
            self.ready, self.since = self.ready + 1, EPOCH + timedelta(seconds=now_s)


def quick(
    loads: Mapping[str, Load],
    per_cell: Mapping[str, float],
    scalers: Mapping[str, Scaler],
    batches: Batches,
    begin: Mapping[str, int],
    start_up_s: float,
    seconds: float,
) -> tuple[dict[str, Course], dict[str, list[int]]]:
    """The weeks: what became of each deployment, and its cells by quarters of an hour."""
    places = {
        name: Place(load, per_cell[name], scalers[name], begin[name], begin[name], start_up_s)
        for name, load in loads.items()
    }
    cells: dict[str, list[int]] = {name: [] for name in loads}
    free, machine_s, now_s = deque[float](), 0.0, 0.0
    while now_s < seconds:
        batches.at(now_s)
        for name, place in places.items():
            place.begin(now_s)
            place.serve(now_s)
            step = place.scaler.wanted(place.seen(now_s), EPOCH + timedelta(seconds=now_s)) - place.wanted
            if step:
                place.change(step, now_s, free)
            batches.serve(name, FILL * place.ready * place.per_cell - place.working, LOOK_S)
            if now_s % SLOT_S == 0:
                cells[name].append(place.ready)
        while free and free[0] < now_s - KEPT_S:
            free.popleft()
        machine_s += LOOK_S * NODES * (sum(one.ready + len(one.starting) for one in places.values()) + len(free))
        now_s += LOOK_S
    for place in places.values():
        place.course.machine_s = machine_s
    return {name: place.course for name, place in places.items()}, cells
