"""Tokens a minute on virtual time, and the arithmetic of the proxies' hosts."""

import random

import pytest

from bench.traffic.arrivals import Arrival
from bench.traffic.proxy_hosts import HostPlan, PathCost, arithmetic
from bench.traffic.tokens_per_minute import (
    TRACE_S,
    Answer,
    Load,
    again_at_s,
    all_regions,
    by_region,
    least_cells,
    one_lost,
    result,
    superposed,
    without_last,
)

CHANCE = random.Random(7)
TRACE = [Arrival(TRACE_S * index / 4000, CHANCE.randrange(100, 1500), 20, f"r{index}") for index in range(4000)]
LOAD = Load(tokens_per_minute=12_000.0, counts_prompts=False, warm_up_s=2.0, measured_s=10.0)


def test_copies_of_the_trace_carry_the_wanted_tokens() -> None:
    arrivals = superposed(TRACE, LOAD, seed=1)

    assert LOAD.copies(TRACE) == pytest.approx(8.75)
    assert sum(map(LOAD.tokens, arrivals)) / LOAD.until_s * 60 == pytest.approx(12_000, rel=0.2)
    assert all(0 <= arrival.at_s < LOAD.until_s for arrival in arrivals)
    assert arrivals == superposed(TRACE, LOAD, seed=1)
    assert arrivals != superposed(TRACE, LOAD, seed=2)


def test_a_lost_region_loses_no_request() -> None:
    parts = by_region(superposed(TRACE, LOAD, seed=1), 3, seed=1)

    answers = one_lost(parts, cells=2, load=LOAD, failover_s=3.0)

    measured = sum(arrival.at_s >= LOAD.warm_up_s for part in parts for arrival in part)
    held = [answer for answer in answers if answer.is_held]
    assert measured <= len(answers) <= measured + 5
    assert held
    assert min(answer.ttft_s for answer in held) > 3.0
    assert sum(map(len, without_last(parts))) == sum(map(len, parts))


@pytest.mark.parametrize(("at_s", "again_s"), [(1.0, 5.0), (2.0, 5.0), (4.0, 7.0), (5.0, 5.0), (8.0, 8.0)])
def test_requests_are_held_until_the_failover(at_s: float, again_s: float) -> None:
    assert again_at_s(at_s, lost_s=2.0, failover_s=3.0) == again_s


def test_one_cell_less_than_the_least_is_too_slow() -> None:
    load = Load(120_000.0, counts_prompts=False, warm_up_s=0.0, measured_s=10.0)
    part = by_region(superposed(TRACE, load, seed=1), 3, seed=1)[:1]

    cells = least_cells(part, load, limit_s=0.5)

    assert cells > 1
    assert result(all_regions(part, cells, load), load, 0.5).p99_s < 0.5
    assert result(all_regions(part, cells - 1, load), load, 0.5).p99_s >= 0.5


def test_a_limit_below_the_time_to_read_a_prompt_is_an_error() -> None:
    part = by_region(superposed(TRACE, LOAD, seed=1), 3, seed=1)[:1]

    with pytest.raises(ValueError, match=r"8 cells in a region do not keep p99 below 0\.01 s"):
        least_cells(part, LOAD, limit_s=0.01, most=8)


def test_broken_and_late_answers_are_not_good() -> None:
    answers = [Answer(0.1, 30), Answer(2.0, 30), Answer(0.1, 0, is_broken=True), Answer(9.0, 30, is_held=True)]

    counted = result(answers, LOAD, 1.0)

    assert (counted.good, counted.broken, counted.held, counted.p99_s) == (0.25, 1, 1, 2.0)
    assert counted.tokens_per_minute == 180.0


def test_the_cost_of_a_token_is_that_of_a_stream_without_its_request() -> None:
    cost = PathCost(requests_s=0.04, streams_s=0.84, stream_tokens=16)

    assert cost.token_s == pytest.approx(50e-6)
    assert cost.cores(100.0, 50_000.0) == pytest.approx(2.504)
    assert arithmetic("ingress", cost, 100.0, 50_000.0) == (
        "ingress: 100 requests/s x 40 us + 50,000 tokens/s x (0.84 - 0.04) s / 1,000 / 16 = 50.0 us = 2.50 cores"
    )


@pytest.mark.parametrize(
    ("cores", "regions", "hosts"),
    [
        (0.1, 3, 2),  # at least two
        (40.0, 3, 5),  # two regions carry 20 cores each, on hosts that use 4 of 8
        (40.1, 3, 6),
        (40.0, 1, 10),  # a lone region carries everything
    ],
)
def test_hosts_carry_everything_without_one_region(cores: float, regions: int, hosts: int) -> None:
    assert HostPlan(cores_per_host=8, utilisation=0.5, regions=regions).hosts_per_region(cores) == hosts
