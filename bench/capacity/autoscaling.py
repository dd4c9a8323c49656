"""Cost and lost minutes of autoscaler policies over recorded load, on virtual time.

The live planners run over a simulated fleet whose machines boot and whose engines load. They are compared with a fleet
of the size of the peak and with the rules of other autoscalers.

    .venv/bin/python -m bench autoscaling m_large --days 14 --bursts
"""

import argparse
import csv
import lzma
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby

from bench.traffic.arrivals import TRACES, azure
from fleet.autoscaling.planning.needs import ScaledPlace
from fleet.autoscaling.planning.policy import CellRange, parse_scaling_policy
from fleet.machines.planner import ProviderLimits
from simulator.clock import EPOCH
from simulator.context import VersionBehaviour
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.load_replay import Course, LoadReplay, PolicyScaler, Scaler, Serving
from simulator.reconciler import Pace
from simulator.world import World

PLACE = ("llm", "east")
PEAK_CELLS = 30
"""Cells are as large as it takes for the peak to need so many at the target: the day's shape counts, not its size."""
TARGET = 0.7
SERVICE_S = 10.0
BOOT_SHARE = 0.375
"""Of a start-up, in which its machines boot; its engine loads for the rest."""
LOOK_S = 15.0
NODES = 2
DAY_S = 86_400.0
COLUMNS = (
    "scaler", "cell h/day", "machine h/day", "most cells", "minutes lost/day", "refused %", "late %", "changes/day",
    "turns/day", "processor s",
)  # fmt: skip
PACE = Pace(every_s=15.0, quiet_s=120.0, wake_up_s=1.0)
RATE = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Load:
    """A recorded load: requests a second by the second of the run."""

    name: str
    seconds: float
    rate: RATE
    peak: float


def servegen(column: str, days: float) -> Load:
    """A ServeGen series: means of ten minutes, with straight lines between their middles."""
    with lzma.open(TRACES / "servegen_rates.csv.xz", "rt", newline="") as lines:
        rates = [float(row[column]) for row in csv.DictReader(lines)]
    return _between(column, rates[: round(days * 144)], 600.0)


def azure_2024(column: str, days: float) -> Load:
    """A week of Azure's, `conversation` or `code`: means of a quarter of an hour."""
    with lzma.open(TRACES / "azure_2024_rates.csv.xz", "rt", newline="") as lines:
        rates = [float(row[column]) for row in csv.DictReader(lines)]
    return _between(column, rates[: round(days * 96)], 900.0)


def azure_2023() -> Load:
    """The requests of one hour, counted by ten seconds."""
    counted = {tick: len(list(group)) for tick, group in groupby(azure(), key=lambda one: int(one.at_s // 10))}
    return _between("azure_2023", [counted.get(tick, 0) / 10 for tick in range(max(counted) + 1)], 10.0)


def with_bursts(load: Load) -> Load:
    """The same with the bursts of Azure's hour laid over it, again and again: means of ten minutes have none."""
    hour = azure_2023()
    mean = _mean(hour)
    return replace(load, rate=lambda second: load.rate(second) * hour.rate(second % hour.seconds) / mean)


def _between(name: str, rates: list[float], step_s: float) -> Load:
    def rate(second: float) -> float:
        place = min(max(second / step_s - 0.5, 0.0), len(rates) - 1.0)
        before = int(place)
        after = min(before + 1, len(rates) - 1)
        return rates[before] + (place - before) * (rates[after] - rates[before])

    return Load(name, len(rates) * step_s, rate, max(rates))


@dataclass
class Fixed:
    cells: int

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        return self.cells


@dataclass
class Threshold:
    """One cell more above 80 %, one less below 50 %, and 5 minutes of peace after each: a simple scaling policy."""

    per_cell: float
    changed_at: datetime = EPOCH

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        step = 0
        used = _used(place, self.per_cell)
        if (now - self.changed_at).total_seconds() >= 300.0:
            step = (used > 0.8) - (used < 0.5)
        if step:
            self.changed_at = now
        return place.range.clamped(place.current + step)


@dataclass
class Ratio:
    """A Kubernetes HPA: cells times utilisation over target, a tenth ignored, down by the most of 5 minutes."""

    per_cell: float
    wishes: deque[int] = field(default_factory=lambda: deque(maxlen=int(300.0 / LOOK_S)))

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        ratio = _used(place, self.per_cell) / TARGET
        wish = place.current if abs(ratio - 1) <= 0.1 else math.ceil(max(1, place.ready) * ratio)
        self.wishes.append(place.range.clamped(wish))
        return wish if wish > place.current and wish <= place.range.max else min(place.current, max(self.wishes))


def _used(place: ScaledPlace, per_cell: float) -> float:
    load = place.load
    return load.in_flight / (max(1, place.ready) * per_cell) if load else 0.0


def scalers(load: Load, per_cell: float, start_up_s: float) -> Iterator[tuple[str, Scaler]]:
    def expected(now: datetime) -> float:
        at = (now - EPOCH).total_seconds()
        return max(load.rate(at + start_up_s + ahead) for ahead in range(0, 181, 15)) * SERVICE_S

    def policy(known: Callable[[datetime], float] | None = None, **stated: object) -> PolicyScaler:
        return PolicyScaler(parse_scaling_policy({"mode": "act", **stated}), per_cell, start_up_s, known)

    yield "fixed at the peak", Fixed(PEAK_CELLS)
    yield "fixed at the mean", Fixed(math.ceil(_mean(load) * SERVICE_S / (TARGET * per_cell)))
    yield "one by one (80 %, 50 %, 5 min)", Threshold(per_cell)
    yield "ratio (HPA, 70 %, 5 min)", Ratio(per_cell)
    yield "policy: 70 %, 10 min", policy()
    yield "policy: 60 %, 10 min", policy(target_utilisation=0.6)
    yield "policy: 70 %, 30 min", policy(down_after_s=1800)
    yield "policy: 70 %, 60 min", policy(down_after_s=3600)
    yield "policy: 70 %, 10 min, perfect forecast", policy(expected)
    yield "policy: 80 %, 10 min, perfect forecast", policy(expected, target_utilisation=0.8)


def _mean(load: Load) -> float:
    return sum(load.rate(second) for second in range(0, int(load.seconds), 60)) / max(1, int(load.seconds) // 60)


def replay(load: Load, scaler: Scaler, per_cell: float, begin: int, start_up_s: float) -> Course:
    """One run: a fleet with the cells that the beginning takes, no spares, and the load."""
    load_s = (1 - BOOT_SHARE) * start_up_s
    spec = DeploymentSpec(PLACE[0], {PLACE[1]: begin}, size=NODES, ready_timeout_s=3 * load_s)
    behaviours = {"v1": VersionBehaviour(load_s=load_s, load_spread=0.1)}
    fleet, boot_s = build_fleet(FleetSpec((spec,), spares=0)), BOOT_SHARE * start_up_s
    limits = ProviderLimits(join_timeout_s=4 * boot_s, boot_s=boot_s)
    regions = {name: replace(region, limits=limits) for name, region in fleet.regions.items()}
    world = World(replace(fleet, regions=regions), behaviours=behaviours, skip_repeats=True)
    world.provider.boot_s = boot_s
    world.reconciler.pace = PACE
    serving = Serving(per_cell, SERVICE_S, waiting_per_cell=per_cell / 4)
    cells = CellRange(1, 2 * PEAK_CELLS)
    found = LoadReplay(world, PLACE, load.rate, scaler, serving=serving, cells=cells, look_every_s=LOOK_S)
    world.run_until(load.seconds)
    return found.course


def line(name: str, course: Course, days: float, took_s: float) -> str:
    refused = 100 * course.refused / course.arrived
    late = 100 * course.late / course.arrived
    return (
        f"| {name} | {course.cell_s / 3600 / days:.0f} | {course.machine_s / 3600 / days:.0f} | {course.most} | "
        f"{course.minutes_lost / days:.1f} | {refused:.3f} | {late:.3f} | {course.changes / days:.0f} | "
        f"{course.turns / days:.0f} | {took_s:.0f} |"
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("load", choices=["m_large", "m_mid", "m_small", "azure_2023"])
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--bursts", action="store_true", help="With the bursts of Azure's hour laid over it.")
    parser.add_argument(
        "--start-up", type=float, default=240.0, help="Seconds from a decision until its cell is ready."
    )
    parser.add_argument("--only", default="", help="Scalers whose name has this in it.")
    given = parser.parse_args()
    recorded = azure_2023() if given.load == "azure_2023" else servegen(given.load, given.days)
    load = with_bursts(recorded) if given.bursts else recorded
    per_cell = load.peak * SERVICE_S / (TARGET * PEAK_CELLS)
    first_rate = max(load.rate(second) for second in range(0, int(given.start_up) + 120, 15))
    begin = max(1, math.ceil(first_rate * SERVICE_S / (TARGET * per_cell)))
    days = load.seconds / DAY_S
    print(f"{load.name}{' with bursts' if given.bursts else ''}: {days:.2f} days, peak {load.peak:.0f}/s, ", end="")
    print(f"{per_cell:.0f} concurrent requests a cell, {given.start_up:.0f} s to start\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{' --- |' * len(COLUMNS)}")
    for name, scaler in scalers(load, per_cell, given.start_up):
        if given.only in name:
            began = time.process_time()
            first = scaler.cells if isinstance(scaler, Fixed) else begin
            course = replay(load, scaler, per_cell, first, given.start_up)
            print(line(name, course, days, time.process_time() - began), flush=True)
