"""Leaders' reports become series of their cell, deployment, region and the fleet."""

from datetime import timedelta
from typing import Any

import pytest

from controlplane.observability import fleet
from engine_agent.protocol.metrics import bucket_of
from fleet.deployments.planner import RequestCounts
from fleet.load.models import LoadSubject, LoadWindow, NodeWindow
from fleet.load.planner import FINE_S
from fleet.load.selectors import last_windows, load_series, node_series, seen_in_windows, step_of
from fleet.load.services import history_trim, load_sample, node_windows_sample
from fleet.nodes.models import NodeReport
from kernel import clock
from kernel.time_ranges import LENGTHS_S, TimeRange
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

STEP = timedelta(seconds=FINE_S)
SUBJECTS = ("fleet", "region:us-east-1", "deployment:sim-70b", "deployment:sim-70b@us-east-1", "cell:c1", "cell:c2")


@pytest.fixture(autouse=True)
def two_cells() -> None:
    for number in (1, 2):
        rows.cell(f"c{number}", rows.node(f"n-{number}"))


def look(number: int, **by_node: Any) -> int:
    """Leaders report `{requests_total: …}`, and a sample is taken."""
    now = NOW + number * STEP
    for node, load in by_node.items():
        NodeReport.objects.filter(node_id=node.replace("_", "-")).update(load=load, last_seen_at=now)
    return load_sample(now=now)


def reported(requests: int, errors: int = 0, **more: Any) -> dict[str, Any]:
    return {"requests_total": requests, "errors_total": errors, "in_flight": 3, "usage": [{"since": 0}], **more}


def test_cells_add_up_to_their_deployment_their_region_and_the_fleet() -> None:
    look(0, n_1=reported(100), n_2=reported(0))
    engine = {"running": 4, "kv_percent": 60.0, "preemptions_total": 3}
    look(1, n_1=reported(130, 3, prompt_tokens_total=300, engine=engine), n_2=reported(15))
    last = last_windows(SUBJECTS, NOW + STEP)
    rates = {name: round(point.requests_per_s * FINE_S) for name, point in last.items()}
    assert rates == {**dict.fromkeys(SUBJECTS[:4], 45), "cell:c1": 30, "cell:c2": 15}
    assert (last["fleet"].in_flight, last["fleet"].cells) == (6.0, 2.0)
    whole, quiet = last["fleet"], last["cell:c2"]
    assert (whole.prompt_tokens_per_s, whole.preemptions_per_s, whole.running, whole.kv_percent) == (20.0, 0.2, 4, 60.0)
    assert (quiet.prompt_tokens_per_s, quiet.running, quiet.kv_percent) == (0.0, None, None)


def test_prometheus_reads_the_newest_figures_and_none_that_no_engine_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    look(0, n_1=reported(100), n_2=reported(0))
    look(1, n_1=reported(130, engine={"running": 4}), n_2=reported(15))
    monkeypatch.setattr(clock, "now", lambda: NOW + STEP)
    gauge = next(each for each in fleet.FleetGauges().collect() if each.name == "switchyard_load")
    figures = {each.labels["figure"]: each.value for each in gauge.samples}
    assert {each.labels["deployment"] for each in gauge.samples} == {"sim-70b"}
    assert (figures["requests_per_s"], figures["running"]) == (3.0, 4.0)
    assert "kv_percent" not in figures


def test_looking_twice_in_a_window_counts_once() -> None:
    look(0, n_1=reported(100), n_2=reported(0))
    assert look(1, n_1=reported(130)) > 0
    assert look(1, n_1=reported(130)) == 0


def test_a_cell_that_comes_while_somebody_looks_is_counted_from_its_first_request() -> None:
    look(0, n_1=reported(100))
    look(1, n_1=reported(100), n_2=reported(12))
    assert last_windows(["cell:c2"], NOW + STEP)["cell:c2"].requests_per_s == pytest.approx(12 / FINE_S)


def test_a_leader_that_is_silent_adds_nothing() -> None:
    look(0, n_1=reported(100), n_2=reported(0))
    look(3, n_1=reported(130))
    assert last_windows(["cell:c1", "cell:c2"], NOW + 3 * STEP, within_s=20).keys() == {"cell:c1"}


def test_an_empty_fleet_is_looked_at_too() -> None:
    assert load_sample(now=NOW + timedelta(hours=1)) == 1
    assert LoadSubject.objects.get().name == "fleet"


def test_a_series_has_a_gap_where_nobody_looked() -> None:
    for number in (0, 1, 4):
        look(number, n_1=reported(100 + number), n_2=reported(0))
    span = TimeRange("", NOW + 4 * STEP - timedelta(minutes=30), NOW + 4 * STEP)
    series = load_series(["cell:c1", "cell:gone"], span, FINE_S)
    assert [point is not None for point in series["cell:c1"].points[-5:]] == [True, True, False, False, True]
    assert series["cell:gone"].last is None
    assert len(series["cell:gone"].points) == 120


@pytest.mark.parametrize(
    ("ago", "length", "step_s"),
    [
        ("1h", "1h", 15),
        ("6h", "6h", 300),
        ("6h", "1h", 300),
        ("1d", "1d", 300),
        ("7d", "1h", 3600),
        ("14d", "14d", 3600),
        ("90d", "90d", 3600),
    ],
)
def test_a_range_has_the_finest_steps_that_are_kept_and_fit_on_a_chart(ago: str, length: str, step_s: int) -> None:
    start = NOW - timedelta(seconds=LENGTHS_S[ago])
    assert step_of(TimeRange("", start, start + timedelta(seconds=LENGTHS_S[length])), NOW) == step_s


def test_what_objectives_are_judged_by_is_summed_by_window() -> None:
    slow = {str(bucket_of(30.0)): 4}
    look(0, n_1=reported(0), n_2=reported(0))
    look(1, n_1=reported(10, 2, ttft_counts=slow), n_2=reported(10))
    assert seen_in_windows("deployment:sim-70b", NOW + STEP)[300] == RequestCounts(20, 2, 4)


def test_old_windows_and_subjects_are_forgotten() -> None:
    look(0, n_1=reported(0), n_2=reported(0))
    history_trim(now=NOW + timedelta(minutes=59))
    assert LoadWindow.objects.count() == 6
    history_trim(now=NOW + timedelta(minutes=61))
    assert LoadWindow.objects.count() == 0
    history_trim(now=NOW + timedelta(days=15))
    assert LoadSubject.objects.count() == 0


def test_a_look_takes_as_many_queries_for_four_cells_as_for_two(django_assert_num_queries: Any) -> None:
    look(0, n_1=reported(0), n_2=reported(0))
    with django_assert_num_queries(13):
        look_only(1)
    for number in (3, 4):
        rows.cell(f"c{number}", rows.node(f"n-{number}"))
    look(2, n_1=reported(0), n_2=reported(0), n_3=reported(0), n_4=reported(0))
    with django_assert_num_queries(13):
        look_only(3)


def look_only(number: int) -> None:
    NodeReport.objects.update(last_seen_at=NOW + number * STEP)
    load_sample(now=NOW + number * STEP)


ACCELERATOR = {
    "index": 0,
    "utilisation_percent": 80.0,
    "memory_used_bytes": 60,
    "memory_total_bytes": 80,
    "temperature_c": 70.0,
    "power_watts": 500.0,
    "clocks": {"clock_mhz": 990, "max_clock_mhz": 1980},
    "errors": {"ecc_corrected": 3, "row_remap_failed": 9, "nvlink_replay": 5, "pcie_replay": 1},
}
COOL = {"index": 1, "utilisation_percent": 40.0, "temperature_c": 50.0, "power_watts": 300.0, "errors": {}}


def report_use(minute: int, node: str, **telemetry: Any) -> int:
    now = NOW + timedelta(minutes=minute)
    NodeReport.objects.filter(node_id=node).update(telemetry=telemetry, last_seen_at=now)
    return node_windows_sample(now=now)


def test_use_of_a_node_is_that_of_its_machine_and_its_devices() -> None:
    look(0, n_1=reported(1), n_2=reported(1))
    host = {"memory_bytes": 200, "network_received_bytes": 1000, "filesystem_used_bytes": 1, "filesystem_bytes": 4}
    network = [{"name": "efa_0", "errors": {"rx_drops": 4}}]
    common = {"host_cpu_percent": 25.0, "host_memory_used_bytes": 50, "network": network}
    assert report_use(1, "n-1", accelerators=[ACCELERATOR, COOL], host=host, **common) == 4
    assert report_use(1, "n-1", host=host) == 0, "the minute is stored"
    worse = {**ACCELERATOR, "errors": {"ecc_corrected": 8, "nvlink_replay": 1}}
    report_use(2, "n-1", accelerators=[worse], host={**host, "network_received_bytes": 7000}, **common)
    now = NOW + timedelta(minutes=2)
    first, second = node_series(["node:n-1"], TimeRange("", now - timedelta(minutes=2), now), now)["node:n-1"].points
    assert first is not None
    assert second is not None
    assert (first.cpu_percent, first.memory_percent, first.disk_percent) == (25.0, 25.0, 25.0)
    assert (first.utilisation_percent, first.device_memory_percent, first.clock_percent) == (60.0, 75.0, 50.0)
    assert (first.temperature_c, first.power_watts, first.ecc_errors) == (70.0, 800.0, None)
    assert (second.network_received_per_s, second.disk_read_per_s) == (100.0, None)
    assert (second.ecc_errors, second.link_errors) == (5.0, 5.0), "1 NVLink and 4 EFA errors since its driver restarted"


def test_a_deployment_and_a_region_have_the_mean_of_their_nodes_the_hottest_device_and_the_total_power() -> None:
    look(0, n_1=reported(1), n_2=reported(1))
    NodeReport.objects.update(last_seen_at=NOW + timedelta(minutes=1))
    NodeReport.objects.filter(node_id="n-2").update(telemetry={"host_cpu_percent": 75.0, "accelerators": [COOL]})
    assert report_use(1, "n-1", host_cpu_percent=25.0, accelerators=[ACCELERATOR]) == 5
    now = NOW + timedelta(minutes=1)
    span = TimeRange("", now - timedelta(minutes=1), now)
    for subject in ("deployment:sim-70b", "region:us-east-1", "fleet"):
        (point,) = node_series([subject], span, now)[subject].points
        assert point is not None
        assert (point.cpu_percent, point.utilisation_percent) == (50.0, 60.0)
        assert (point.temperature_c, point.power_watts, point.ecc_errors) == (70.0, 800.0, None)


def test_windows_of_nodes_become_longer_ones_and_end_with_their_retention() -> None:
    for minute in range(1, 11):
        report_use(minute, "n-1", host_cpu_percent=float(minute))
    longer = NodeWindow.objects.filter(step_s=300, subject__name="node:n-1").order_by("at")
    assert [row.cpu_percent for row in longer] == [3.0, 8.0]
    history_trim(now=NOW + timedelta(hours=7))
    assert set(NodeWindow.objects.values_list("step_s", flat=True)) == {300}
    history_trim(now=NOW + timedelta(days=15))
    assert not LoadSubject.objects.exists()


def test_a_report_of_impossible_numbers_stops_no_other_nodes_window() -> None:
    mad = {"host_cpu_percent": 1e300, "accelerators": [{"errors": {"ecc_corrected": 10**40}, "power_watts": -5}]}
    assert report_use(1, "n-1", **mad, host={"memory_bytes": 0, "network_sent_bytes": 10**40}) > 0
    row = NodeWindow.objects.get(subject__name="node:n-1")
    assert (row.power_watts, row.network_sent, row.ecc_errors) == (0.0, 9 * 10**15, 9 * 10**15)


def test_windows_of_more_nodes_take_no_more_statements(django_assert_num_queries: Any) -> None:
    for number in (3, 4, 5):
        rows.node(f"n-{number}")
    with django_assert_num_queries(12):
        node_windows_sample(now=NOW)
