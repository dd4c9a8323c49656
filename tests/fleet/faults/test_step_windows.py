"""Growing counters are cut into comparable windows."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.faults.models import StepRecord
from fleet.faults.planning.views import DeviceWindow
from fleet.faults.services.incidents import step_windows_cut
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.selectors.snapshot import fleet_view
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

WINDOW = timedelta(seconds=FaultSettings().step_window_s)
FIRST = int(NOW.timestamp() // FaultSettings().step_window_s)


@pytest.fixture(autouse=True)
def node() -> Node:
    node = rows.node("n-a")
    rows.cell("c1", node)
    return node


def report_steps(steps: int, compute_ms: float, **changes: Any) -> None:
    totals = {"steps": {"3": steps}, "compute_ms": {"3": compute_ms}}
    NodeReport.objects.filter(node_id="n-a").update(steps=totals, **changes)


def windows() -> list[tuple[int, float, float]]:
    known = fleet_view(now=NOW).faults.windows.get("n-a", ())
    return [(window.index - FIRST, window.steps[3], window.compute_ms[3]) for window in known]


def test_a_window_holds_what_was_added_in_it() -> None:
    for number in range(3):
        report_steps(100 * (number + 1), 2000.0 * (number + 1))
        step_windows_cut(now=NOW + number * WINDOW)
    assert windows() == [(0, 100, 2000.0), (1, 100, 2000.0)]


def test_the_last_five_are_kept() -> None:
    for number in range(9):
        report_steps(100 * (number + 1), 2000.0 * (number + 1))
        step_windows_cut(now=NOW + number * WINDOW)
    assert [index for index, _, _ in windows()] == [3, 4, 5, 6, 7]


def test_looking_twice_in_a_window_changes_nothing() -> None:
    report_steps(100, 2000.0)
    step_windows_cut(now=NOW)
    report_steps(200, 4000.0)
    step_windows_cut(now=NOW)
    assert windows() == []


def test_a_window_that_nobody_closed_in_time_is_left_out() -> None:
    report_steps(100, 2000.0)
    step_windows_cut(now=NOW)
    report_steps(200, 4000.0)
    step_windows_cut(now=NOW + 2 * WINDOW)
    report_steps(300, 6000.0)
    step_windows_cut(now=NOW + 3 * WINDOW)
    assert windows() == [(2, 100, 2000.0)]


def test_a_new_generation_begins_anew() -> None:
    report_steps(100, 2000.0)
    step_windows_cut(now=NOW)
    report_steps(200, 4000.0)
    step_windows_cut(now=NOW + WINDOW)
    report_steps(5, 100.0, generation=2)
    step_windows_cut(now=NOW + 2 * WINDOW)
    assert windows() == []


def test_an_idle_rank_has_no_window_and_one_that_counts_anew_neither() -> None:
    for number, steps in enumerate((100, 100, 50)):
        report_steps(steps, 20.0 * steps)
        step_windows_cut(now=NOW + number * WINDOW)
    assert windows() == []


def test_what_a_retired_node_computed_is_forgotten() -> None:
    report_steps(100, 2000.0)
    step_windows_cut(now=NOW)
    Node.objects.update(state="retired")
    NodeReport.objects.all().delete()
    step_windows_cut(now=NOW + WINDOW)
    assert not StepRecord.objects.exists()


def report_clocks(number: int, *, hot_ms: int, steps: int | None = None) -> None:
    """After so many windows of 30 s in use at half its clock."""
    sums = {"sampled_ms": 30_000 * number, "full_clock_ms": 15_000 * number}
    reasons = {"hw_thermal_slowdown": hot_ms * number, "sw_power_cap": 5}
    device = {"kind": "nvidia", "index": 3, "clocks": {"max_clock_mhz": 1980, **sums, "reason_ms": reasons}}
    totals = {"steps": {"3": steps}, "compute_ms": {"3": 20.0 * steps}} if steps else None
    plain = {"kind": "nvidia", "index": 4, "clocks": None}
    NodeReport.objects.filter(node_id="n-a").update(telemetry={"accelerators": [device, plain]}, steps=totals)


@pytest.mark.parametrize("counts_steps", [False, True])
def test_clocks_of_devices_are_cut_into_shares_with_or_without_steps(counts_steps: bool) -> None:
    for number in range(1, 4):
        report_clocks(number, hot_ms=27_000, steps=100 * number if counts_steps else None)
        step_windows_cut(now=NOW + number * WINDOW)
    known = fleet_view(now=NOW).faults.windows["n-a"]
    assert [window.devices for window in known] == [
        {"nvidia 3": DeviceWindow(0.5, {"hw_thermal_slowdown": 0.9})} for _ in range(2)
    ]
    assert [bool(window.steps) for window in known] == [counts_steps] * 2


def test_a_reader_that_started_again_shows_no_window() -> None:
    report_clocks(9, hot_ms=27_000)
    step_windows_cut(now=NOW)
    report_clocks(1, hot_ms=27_000)
    step_windows_cut(now=NOW + WINDOW)
    assert "n-a" not in fleet_view(now=NOW).faults.windows or fleet_view(now=NOW).faults.windows["n-a"] == ()
