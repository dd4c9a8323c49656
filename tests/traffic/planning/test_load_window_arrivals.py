"""What arrives from applications, out of what ingresses count."""

from typing import Any

import pytest

from traffic.planning.load_window import IngressCounters, arrivals_per_s, in_service, ingress_counters


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
