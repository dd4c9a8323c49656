"""Windows, arrivals from ingress counters, and incidents about regions without a usable cell."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fleet.reconcile.planning.states import CellState
from traffic.region_shares.planning.load import (
    OPEN_AFTER_S,
    SAMPLES_MAX,
    CellStanding,
    IngressCounters,
    IngressSilence,
    Place,
    Sample,
    arrivals_per_s,
    arrivals_to_expect,
    assess_place,
    capacity_to_count_on,
    has_requests,
    in_service,
    ingress_counters,
    is_calm,
    is_starting,
    lost_regions,
    recent_samples,
    service_time_s,
    share_lost,
)


def samples(*capacities: float, arrivals: float = 5.0, every_s: float = 2.0) -> tuple[Sample, ...]:
    return tuple(Sample(index * every_s, arrivals, 10.0, capacity) for index, capacity in enumerate(capacities))


def test_capacity_is_the_least_of_the_last_minute() -> None:
    assert capacity_to_count_on(samples(10, 3, 10), now=4) == 3
    assert capacity_to_count_on(samples(10, 3, 10), now=62.5) == 10
    assert capacity_to_count_on((), now=0) == 0


@pytest.mark.parametrize(
    ("capacities", "lost"),
    [((10, 10), 0), ((10, 4), 0.6), ((10, 4, 10), 0.6), ((0, 10), 0), ((), 0), ((4, 10, 5), 0.5)],
)
def test_only_a_fall_loses_something(capacities: tuple[float, ...], lost: float) -> None:
    assert share_lost(samples(*capacities), now=10) == pytest.approx(lost)


def test_arrivals_are_the_greatest_average_over_fifteen_seconds() -> None:
    steady = samples(*[1.0] * 20)
    burst = tuple(Sample(s.at, 80.0 if s.at == 20 else 0.0, 0.0, 1.0) for s in steady)
    assert arrivals_to_expect(steady) == 5.0
    assert arrivals_to_expect(burst) == 10.0, "one of eight samples"
    assert arrivals_to_expect(steady[:2]) == 5.0
    assert arrivals_to_expect(()) == 0.0


def test_the_first_moments_of_a_window_do_not_count_as_a_peak() -> None:
    first = Sample(0.0, 500.0, 0.0, 1.0)
    assert arrivals_to_expect((first, *samples(*[1.0] * 20)[1:])) < 70.0


def test_how_long_a_request_takes_is_littles_law() -> None:
    assert service_time_s(samples(1, 1, 1)) == 2.0
    assert service_time_s(samples(1, arrivals=0.0)) == 0.0


@pytest.mark.parametrize(
    ("capacities", "now", "starting"),
    [((), 0, True), ((0, 0), 4, True), ((0, 0), 61, False), ((0, 5), 4, False), ((5, 0), 4, False)],
)
def test_a_region_starts_until_its_first_cell_or_for_a_minute(
    capacities: tuple[float, ...], now: float, starting: bool
) -> None:
    assert is_starting(samples(*capacities), now) is starting


def test_windows_are_bounded_in_time_and_number() -> None:
    assert min(s.at for s in recent_samples(samples(*[1.0] * 60), now=118.0)) >= 118.0 - 75.0
    assert len(recent_samples(samples(*[1.0] * 500, every_s=0.1), now=50.0)) == SAMPLES_MAX


def telemetry(local: int, worker: int = 7, **spilled: int) -> dict[str, Any]:
    pool = {"requests_total": local, "spilled_to": spilled}
    return {
        "worker_pid": worker,
        "pools": {"llama": pool},
        "cells": {"c1": {"in_flight": 3}, "c2": {"in_flight": 4}, "c3": {}},
    }


def test_rates_are_the_difference_between_two_words() -> None:
    first = ingress_counters(None, telemetry(100), "llama", 10.0)
    second = ingress_counters(first, telemetry(120, west=8), "llama", 12.0)
    assert second is not None
    assert (second.local_per_s, second.spilled_per_s) == (10.0, {"west": 4.0})


def test_the_same_word_again_says_nothing_new() -> None:
    first = ingress_counters(None, telemetry(100), "llama", 10.0)
    second = ingress_counters(first, telemetry(120), "llama", 12.0)
    assert ingress_counters(second, telemetry(120), "llama", 12.0) == second


@pytest.mark.parametrize(("worker", "total", "per_s"), [(8, 6, 3.0), (7, 40, 0.0)])
def test_a_new_worker_counts_from_zero_and_a_server_that_left_takes_its_count_along(
    worker: int, total: int, per_s: float
) -> None:
    first = ingress_counters(None, telemetry(100), "llama", 10.0)
    second = ingress_counters(first, telemetry(total, worker), "llama", 12.0)
    assert second is not None
    assert second.local_per_s == per_s


def test_a_pool_that_an_ingress_does_not_speak_of_keeps_its_last_word() -> None:
    first = ingress_counters(None, telemetry(100), "llama", 10.0)
    assert ingress_counters(first, {}, "llama", 12.0) == first
    assert ingress_counters(None, {}, "llama", 12.0) is None


def test_what_another_region_sent_is_not_demand_of_this_one() -> None:
    east = IngressCounters(0, 1, 0, local_per_s=10.0, spilled_per_s={"west": 4.0})
    west = IngressCounters(0, 1, 0, local_per_s=9.0)
    assert arrivals_per_s({"east": [east], "west": [west]}) == {"east": 14.0, "west": 5.0}
    assert arrivals_per_s({"east": [east], "west": []}) == {"east": 14.0, "west": 0.0}


def test_only_what_cells_work_on_is_in_service() -> None:
    assert in_service(telemetry(0), ["c1", "c3", "gone"]) == 3.0


NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
LONG_AGO = NOW - timedelta(hours=1)
DOWN = CellStanding("c1", CellState.READY, LONG_AGO, views={"i-1": "down", "i-2": "up"})
OUT = Place(
    "llama", "east", wanted=1, capacity=0.0, emptied=False, closed=False, cells=(DOWN,), elsewhere=("west",),
    refused={"no_ready_cell": 7, "queue_full": 1}, served=True, since=NOW - timedelta(seconds=OPEN_AFTER_S),
    refused_before={"no_ready_cell": 3, "queue_full": 1},
)  # fmt: skip


def test_after_five_seconds_without_a_usable_cell_the_incident_says_which_and_what_it_cost() -> None:
    unserved = assess_place(OUT, NOW).unserved
    assert unserved is not None
    assert unserved.summary == (
        "No cell of llama in east can serve: c1 is ready, down at its ingresses; requests go to west;"
        " 4 requests failed since"
    )
    assert unserved.evidence["refused"] == {"no_ready_cell": 4}
    assert unserved.evidence["cells"][0]["ingresses"] == {"i-1": "down", "i-2": "up"}
    assert unserved.evidence["since"] == OUT.since.isoformat()  # type: ignore[union-attr]


def test_the_five_seconds_begin_with_the_first_look_that_found_none() -> None:
    first = assess_place(replace(OUT, since=None, refused_before={}), NOW)
    assert first.unserved is None
    assert (first.noted.since, first.noted.refused_before) == (NOW, OUT.refused)
    later = replace(OUT, since=first.noted.since, refused_before=first.noted.refused_before)
    assert assess_place(later, NOW + timedelta(seconds=OPEN_AFTER_S - 0.1)).unserved is None
    assert assess_place(later, NOW + timedelta(seconds=OPEN_AFTER_S)).unserved is not None


@pytest.mark.parametrize(
    "change",
    [
        {"wanted": 0},
        {"closed": True},
        {"served": False},
        {"capacity": 8.0},
        {"cells": (replace(DOWN, on_purpose=True),)},
        {"cells": (replace(DOWN, state=CellState.DRAINING),)},
        {"cells": (replace(DOWN, since=NOW - timedelta(seconds=3)),)},
        {"cells": (replace(DOWN, on_purpose=True), replace(DOWN, id="c2", state=CellState.DRAINING))},
        {"cells": ()},
    ],
    ids=["scaled to 0", "evacuated", "never served", "serves", "a rollout's", "draining", "has just become ready",
         "several, all on purpose", "no row"],
)  # fmt: skip
def test_what_is_meant_to_be_opens_no_incident(change: dict[str, object]) -> None:
    judgement = assess_place(replace(OUT, **change), NOW)  # type: ignore[arg-type]
    assert (judgement.unserved, judgement.noted.since) == (None, None)
    assert judgement.resolution


@pytest.mark.parametrize("state", [CellState.FAILED, CellState.LOST, CellState.STARTING, CellState.PENDING])
def test_a_cell_that_broke_and_comes_again_is_missed_until_it_serves(state: CellState) -> None:
    broken = replace(DOWN, state=state, since=NOW, reason="exit 139", views={})
    unserved = assess_place(replace(OUT, cells=(broken,)), NOW).unserved
    assert unserved is not None
    assert f"c1 is {state} (exit 139)" in unserved.summary


def test_a_region_that_the_autopilot_emptied_is_one_though_its_cells_are_well() -> None:
    well = replace(DOWN, views={"i-1": "up"})
    emptied = replace(OUT, capacity=8.0, emptied=True, cells=(well,), elsewhere=(), refused={})
    unserved = assess_place(emptied, NOW).unserved
    assert unserved is not None
    assert unserved.summary.startswith("The autopilot sends all requests for llama away from east, which has cells")
    assert "no region serves it; no request failed yet" in unserved.summary


def test_what_is_scaled_to_zero_is_cold_when_it_comes_back_and_what_was_evacuated_is_not() -> None:
    assert not assess_place(replace(OUT, wanted=0), NOW).noted.served
    assert assess_place(replace(OUT, closed=True), NOW).noted.served


BOTH_OUT = [(place, assess_place(place, NOW)) for place in (OUT, replace(OUT, deployment="qwen"))]
QUIET = {"east": [IngressSilence("i-1", NOW - timedelta(seconds=31))]}
LOUD = {"east": [*QUIET["east"], IngressSilence("i-2", NOW)]}


def test_a_region_that_serves_none_of_its_deployments_is_lost() -> None:
    (lost,) = lost_regions(BOTH_OUT, {}, False, NOW).items()
    assert lost[0] == "east"
    assert lost[1].summary == "east serves nothing: no cell of its 2 deployments can serve; requests go to west"
    assert (lost[1].evidence["deployments"], lost[1].evidence["refused"]) == (["llama", "qwen"], {"no_ready_cell": 8})
    serves = replace(OUT, deployment="gemma", capacity=8.0)
    evacuated = replace(OUT, deployment="gemma", closed=True)
    assert not lost_regions([*BOTH_OUT, (serves, assess_place(serves, NOW))], {}, True, NOW)
    assert lost_regions([*BOTH_OUT, (evacuated, assess_place(evacuated, NOW))], {}, True, NOW)
    assert not lost_regions(BOTH_OUT[:1], {}, True, NOW), "the incident of the deployment says the same"


def test_a_region_whose_ingresses_are_all_silent_is_lost_if_agents_report() -> None:
    serves = replace(OUT, capacity=8.0)
    found = [(serves, assess_place(serves, NOW))]
    (lost,) = lost_regions(found, QUIET, True, NOW).values()
    assert lost.summary == "east may serve nothing: its ingress has not reported for 31 s"
    assert lost.evidence["ingresses"] == [{"ingress": "i-1", "silent_s": 31}]
    assert not lost_regions(found, QUIET, False, NOW), "the control plane is cut off"
    assert not lost_regions(found, LOUD, True, NOW)
    closed = replace(serves, closed=True)
    assert not lost_regions([(closed, assess_place(closed, NOW))], QUIET, True, NOW), "an operator evacuated it"


def test_a_window_without_requests_and_with_one_capacity_is_calm() -> None:
    calm = tuple(Sample(float(at), 0.0, 0.0, 8.0) for at in range(5))
    assert is_calm(calm)
    assert is_calm(())
    for change in ({"arrivals_per_s": 0.1}, {"in_service": 1.0}, {"queued": 1.0}, {"capacity": 4.0}):
        assert not is_calm((*calm, replace(calm[-1], **change)))


def test_an_ingress_has_requests_that_run_or_came_since_the_last_report() -> None:
    idle = {"pools": {"chat": {"in_flight": 0, "requests_total": 7}}}
    assert not has_requests(idle, idle)
    assert has_requests(idle, {"pools": {"chat": {"in_flight": 0, "requests_total": 8}}})
    assert has_requests(idle, {"pools": {"chat": {"in_flight": 1, "requests_total": 7}}})
    assert not has_requests({}, {})
