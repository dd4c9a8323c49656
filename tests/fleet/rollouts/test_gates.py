"""Verdicts of gates on updated cells and control cells, and the objection of stored benchmarks."""

from typing import Any

import pytest

from fleet.deployments.planner import GatePolicy, GoodputMissing
from fleet.load.planner import CellCounters, pooled
from fleet.reconcile.planning.snapshot import Finding, Verdict
from fleet.rollouts.planning.gates import gate_verdict, goodput_objection
from models_registry.benchmarks.planning.workload import ComparedGoodput

POLICY = GatePolicy()
USUAL = {60: 40, 61: 40, 62: 20}


def counted(requests: int = 100, errors: int = 0, shift: int = 0, **changes: Any) -> CellCounters:
    """Counters with latencies `shift` buckets (9 % each) above normal."""
    latencies = {bucket + shift: count * requests // 100 for bucket, count in USUAL.items()}
    return CellCounters(1, requests, errors, **{"ttft": latencies, "itl": latencies, **changes})


def verdict(updated: CellCounters, control: CellCounters | None = None) -> Verdict:
    return gate_verdict(updated, counted(300) if control is None else control, POLICY)


@pytest.mark.parametrize(
    ("updated", "finding"),
    [
        (counted(), Finding.PASSED),
        (counted(shift=1), Finding.PASSED),
        (counted(shift=-8), Finding.PASSED),
        (counted(shift=4), Finding.WORSE),
        (counted(errors=1), Finding.PASSED),
        (counted(errors=6), Finding.WORSE),
        (counted(49), Finding.INCONCLUSIVE),
        (counted(0), Finding.INCONCLUSIVE),
        (counted(ttft={}), Finding.INCONCLUSIVE),
    ],
    ids=["alike", "9 % slower", "twice as fast", "1.41 x slower", "one error", "six errors", "few", "none", "no ttft"],
)
def test_a_version_is_worse_when_a_difference_is_large_and_no_chance(updated: CellCounters, finding: Finding) -> None:
    assert verdict(updated).finding is finding


def test_errors_count_even_where_latencies_are_few() -> None:
    found = verdict(counted(40, errors=20))
    assert (found.finding, found.reason) == (
        Finding.WORSE,
        "50.0% of requests failed, 0.0% with the old version",
    )


def test_a_tail_alone_can_be_worse() -> None:
    found = verdict(counted(itl={60: 40, 61: 40, 75: 20}))
    assert found.reason == "p95 time between tokens is 3.08 times the old version's"


def test_the_numbers_can_be_checked_by_people() -> None:
    numbers = verdict(counted(shift=8)).numbers
    assert numbers["requests"] == 100
    assert numbers["control_requests"] == 300
    median, usual = numbers["time_to_first_token_median_ms"], numbers["time_to_first_token_median_control_ms"]
    assert median is not None
    assert usual is not None
    assert median == pytest.approx(2 * usual, rel=1e-3)


def test_without_any_old_cell_health_decides_and_the_reason_says_so() -> None:
    found = gate_verdict(counted(3, errors=1), None, POLICY)
    assert found.finding is Finding.PASSED
    assert "no cell of the old version is left" in found.reason


def test_only_what_was_counted_since_the_bake_began_counts() -> None:
    before, after = counted(100), counted(300, errors=2)
    since = after.since(before)
    assert since is not None
    assert (since.requests, since.errors, sum(since.ttft.values())) == (200, 2, 200)
    assert counted(50).since(before) is None
    assert CellCounters(2, 500).since(before) is None
    assert pooled([since, since]).requests == 400


ASKED = GatePolicy(goodput_ratio=0.95)


def pair(before: float, after: float, label: str = "1000+150 within ttft=500,itl=50") -> ComparedGoodput:
    return ComparedGoodput(label, before, after)


@pytest.mark.parametrize("compared", [(), (pair(4, 1),)])
def test_without_a_ratio_nobody_asks(compared: tuple[ComparedGoodput, ...]) -> None:
    assert goodput_objection(compared, GatePolicy()) is None


@pytest.mark.parametrize(("after", "passes"), [(4.0, True), (3.8, True), (3.79, False), (0.0, False), (9.0, True)])
def test_as_much_as_the_policy_requires_is_enough(after: float, passes: bool) -> None:
    assert (goodput_objection((pair(4.0, after),), ASKED) is None) is passes


def test_the_worst_of_several_conditions_decides_and_is_named() -> None:
    found = goodput_objection((pair(4, 5), pair(2, 1, "3000+50 within ttft=900,itl=80"), pair(9, 8)), ASKED)
    assert found is not None
    assert found.finding is Finding.INCONCLUSIVE
    assert found.reason == (
        "its goodput is 1 requests/s per cell, 0.50 of the old version's 2, at 3000+50 within ttft=900,itl=80; "
        "0.95 is required"
    )


@pytest.mark.parametrize("compared", [(), (pair(0, 3),)])
def test_nothing_measured_is_as_the_policy_says(compared: tuple[ComparedGoodput, ...]) -> None:
    found = goodput_objection(compared, ASKED)
    assert found is not None
    assert "switchyard bench run" in found.reason
    assert goodput_objection(compared, GatePolicy(goodput_ratio=0.95, goodput_missing=GoodputMissing.GO_ON)) is None
