"""Growing counters are cut into comparable windows."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import msgspec
import pytest

from engine_agent.engines.sim.faults import Faults, parse_fault
from engine_agent.engines.step_meter import StepMeter
from engine_agent.protocol.metrics import bucket_of
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import DeploymentRegion
from fleet.faults.models import Incident, Replacement, StepRecord
from fleet.faults.planning.views import DeviceWindow
from fleet.faults.services.incidents import step_windows_cut
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.reconcile.services import reconcile
from models_registry.versions.models import ModelVersion
from tests.fleet import rows
from tests.fleet.provision import Clock
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


def slow_rank_of_sim(cell_windows: int, ranks: int = 3) -> list[list[dict[str, Any]]]:
    """What the ranks of a cell of the sim engine report after each window, if the last one is set to be slow."""
    faults = [Faults() for _ in range(ranks)]
    faults[-1].put(parse_fault(b'{"kind": "slow", "factor": 3.0}'))
    work, meters = StepMeter(), [StepMeter() for _ in range(ranks)]
    found = []
    for _ in range(cell_windows):
        for step in range(200):
            work.note(1 + step % 7, 20.0)
        for fault, meter in zip(faults, meters, strict=True):
            meter.follow(work.times(), fault.effects().slow_factor)
        found.append([msgspec.to_builtins(meter.times(), str_keys=True) for meter in meters])
    return found


def run_windows(now: Clock, reports: Sequence[Mapping[str, dict[str, Any]]]) -> None:
    """Stores what nodes report at the end of each window, cuts it, and lets the reconciler decide."""
    with mock.patch("fleet.reconcile.selectors.snapshot.lease_held_since", return_value=NOW - timedelta(hours=1)):
        for columns in reports:
            NodeReport.objects.update(last_seen_at=now.now)
            for name, changes in columns.items():
                NodeReport.objects.filter(node_id=name).update(**changes)
            step_windows_cut(now=now.now)
            reconcile()
            now.now += WINDOW


@pytest.mark.usefixtures("cloud")
def test_the_slow_rank_of_a_single_sim_cell_becomes_an_incident_and_its_cell_is_drained(now: Clock) -> None:
    CellMember.objects.all().delete()
    Cell.objects.all().delete()
    ModelVersion.objects.update(parallelism={rows.KIND: {"nodes": 3}})
    names = [f"n-{rank}" for rank in range(3)]
    rows.cell("c3", *(rows.node(name) for name in names), state_since=NOW - timedelta(hours=1))
    every = [
        {name: {"steps": totals} for name, totals in zip(names, reported, strict=True)}
        for reported in slow_rank_of_sim(6)
    ]
    run_windows(now, every)
    incident = Incident.objects.get(kind="node-slow")
    assert (incident.subject, incident.node, incident.cell) == ("n-2", "n-2", "c3")
    assert incident.summary.startswith("Node n-2: slower than the other ranks of its cell in ")
    assert (incident.cohort, incident.evidence["windows"][0]["score"]) == ("ranks of c3", 0.333)
    assert Node.objects.get(id="n-2").cordoned
    assert Replacement.objects.get().node_id == "n-2"


def neuron_load(window: int, token_ms: float) -> dict[str, Any]:
    """The load of a Neuron cell after so many windows: 4 streams that decode, and now and then a prompt."""
    counts = {str(bucket_of(token_ms / 1000)): 1500 * window, str(bucket_of(0.4)): 40 * window}
    work = {"since": 7.5, "busy_ms": 30_000 * window, "steps": 385 * window, "completion_tokens": 1540 * window}
    return {"itl_counts": counts, "work": work}


@pytest.mark.usefixtures("cloud")
def test_a_slow_neuron_node_without_clocks_and_measured_ranks_becomes_an_incident(now: Clock) -> None:
    ModelVersion.objects.update(parallelism={rows.KIND: {"nodes": 1}})
    DeploymentRegion.objects.update(cells=7)
    for number in range(6):
        rows.cell(f"c-{number}", rows.node(f"n-{number}"), state_since=NOW - timedelta(hours=1))
    devices = {"accelerators": [{"kind": "neuron", "index": 0, "clocks": None}]}
    run_windows(
        now,
        [
            {
                f"n-{number}": {"load": neuron_load(window, 45.0 if number == 2 else 20.0), "telemetry": devices}
                for number in range(6)
            }
            for window in range(1, 7)
        ],
    )
    known = fleet_view(now=now.now).faults.windows["n-2"]
    assert [(window.of_cell, window.steps) for window in known] == [(True, {2: 1540})] * 5
    assert known[0].compute_ms[2] / 1540 == pytest.approx(45.0, rel=0.05)
    incident = Incident.objects.get(kind="node-slow")
    assert (incident.subject, incident.node) == ("n-2", "n-2")
    assert incident.evidence["measured"] == "time between tokens of the cell"
    assert not Node.objects.filter(cordoned=True).exists(), "longer contexts make a cell slower as well"
    assert not Replacement.objects.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"itl_counts": {}},
        {"work": None},
        {"work": {"since": 99.0, "steps": 9, "completion_tokens": 9}},
        {"work": {"since": 7.5, "steps": 0, "completion_tokens": 0}},
        {"itl_counts": {"40": 1}},
        {"itl_counts": "many", "work": "much"},
    ],
)
def test_a_proxy_that_counts_nothing_or_anew_shows_no_window(change: dict[str, Any]) -> None:
    for number, load in enumerate((neuron_load(1, 20.0), neuron_load(2, 20.0) | change)):
        NodeReport.objects.filter(node_id="n-a").update(load=load)
        step_windows_cut(now=NOW + number * WINDOW)
    assert fleet_view(now=NOW).faults.windows.get("n-a", ()) == ()
