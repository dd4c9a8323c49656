"""A load on a simulated fleet: no request is unaccounted for, and scalers follow the load."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import pytest

from fleet.autoscaling.planning.needs import ScaledPlace
from fleet.autoscaling.planning.policy import CellRange, ScalingMode, ScalingPolicy
from simulator.clock import EPOCH
from simulator.context import VersionBehaviour
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from simulator.load_replay import LOST_MINUTE, LoadReplay, PolicyScaler, Scaler, Serving
from simulator.world import World

PLACE = ("llm", "east")
SERVING = Serving(per_cell=10.0, service_s=5.0)
"""A cell serves 2 requests a second."""


@dataclass
class Fixed:
    cells: int

    def wanted(self, place: ScaledPlace, now: datetime) -> int:
        return self.cells


def replayed(rate: Callable[[float], float], scaler: Scaler, *, cells: int = 2, seconds: float = 1800.0) -> LoadReplay:
    fleet = build_fleet(FleetSpec((DeploymentSpec(PLACE[0], {PLACE[1]: cells}, size=1),), spares=0))
    world = World(fleet, behaviours={"v1": VersionBehaviour(load_s=60.0, load_spread=0.0)}, skip_repeats=True)
    replay = LoadReplay(world, PLACE, rate, scaler, serving=SERVING, cells=CellRange(1, 10))
    world.run_until(seconds - 1)
    assert world.timeline.counts[LOST_MINUTE] == replay.course.minutes_lost
    return replay


def following(**changes: object) -> PolicyScaler:
    policy = ScalingPolicy(ScalingMode.ACT, **changes)  # type: ignore[arg-type]
    return PolicyScaler(policy, SERVING.per_cell, start_up_s=70.0)


def test_what_cells_can_do_is_served_and_nobody_waits() -> None:
    course = replayed(lambda _: 4.0, Fixed(2)).course
    assert (course.arrived, course.refused, course.late, course.minutes_lost) == (7200.0, 0.0, 0.0, 0)
    assert (course.changes, course.most) == (0, 2)
    assert course.cell_s == course.machine_s == 2 * 1800.0


def test_what_is_too_much_waits_and_is_refused() -> None:
    course = replayed(lambda _: 8.0, Fixed(2)).course
    assert course.refused == pytest.approx(course.arrived / 2, rel=0.02)
    assert course.minutes_lost == 30


@pytest.mark.slow
def test_a_policy_follows_a_load_up_and_down_and_costs_less_than_the_peak() -> None:
    def rate(second: float) -> float:
        return 2.0 if second < 600 or second > 1800 else 8.0

    course = replayed(rate, following(down_after_s=300.0), seconds=5400.0).course
    assert 6 <= course.most <= 9, "40 requests at once at 70 % of 10 each, and more while those that waited are served"
    assert course.turns == 1
    assert course.minutes_lost <= 3, "the jump of four times, until cells have started"
    assert course.cell_s < 0.75 * 6 * 5400
    assert course.machine_s >= course.cell_s, "machines boot before, and stay for a while after"


@pytest.mark.long
def test_known_beforehand_the_jump_costs_nobody_anything() -> None:
    def rate(second: float) -> float:
        return 2.0 if second < 600 else 8.0

    def expected(now: datetime) -> float:
        return rate((now - EPOCH).total_seconds() + 120.0) * SERVING.service_s

    scaler = following()
    scaler.forecast = expected
    assert replayed(rate, scaler).course.minutes_lost == 0
    assert replayed(rate, following()).course.minutes_lost > 0


@pytest.mark.long
def test_a_steady_load_changes_nothing_once_it_is_followed() -> None:
    early = replayed(lambda _: 7.0, following(), seconds=1800.0).course
    late = replayed(lambda _: 7.0, following(), seconds=7200.0).course
    assert late.changes == early.changes
    assert late.turns <= 1
    assert late.cell_s - early.cell_s == pytest.approx(6 * 5400, rel=0.01), "five, and one for a tenth of free target"
