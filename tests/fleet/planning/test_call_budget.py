"""The budget of calls: never beyond EC2's own bucket, always some time, and half after it throttled."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.call_budget import (
    DESCRIBE,
    LAUNCHED_MACHINES,
    MUTATING,
    OWN_SHARE,
    RATES,
    Bucket,
    NotBefore,
    Taken,
    bucket_of,
    full,
    steady_calls,
    take,
    throttled,
)
from tests.fleet.planning.fleets import NOW


def taken_at_once(name: str, bucket: Bucket) -> int:
    number = 0
    while isinstance(answer := take(name, bucket, NOW), Taken):
        bucket, number = answer.bucket, number + 1
    return number


def test_four_fifths_of_a_bucket_are_ours_and_one_call_always_is() -> None:
    at_once = {name: taken_at_once(name, full(name, NOW)) for name in RATES}
    assert at_once[DESCRIBE] == 80
    assert at_once["RunInstances"] == 4
    assert at_once["DescribeInstanceTopology"] == 1


def test_the_next_call_is_told_when() -> None:
    bucket = full("DescribeInstanceTopology", NOW)
    first = take("DescribeInstanceTopology", bucket, NOW)
    assert isinstance(first, Taken)
    second = take("DescribeInstanceTopology", first.bucket, NOW)
    assert isinstance(second, NotBefore)
    assert second.at == NOW + timedelta(seconds=1.251)


def test_throttled_is_empty_and_half_as_fast_for_a_minute() -> None:
    bucket = throttled("RunInstances", full("RunInstances", NOW), NOW)
    answer = take("RunInstances", bucket, NOW)
    assert isinstance(answer, NotBefore)
    assert answer.at == NOW + timedelta(seconds=1 / 0.8 + 0.001)
    later = take("RunInstances", bucket, NOW + timedelta(seconds=61))
    assert isinstance(later, Taken)


def test_what_no_bucket_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="RunInstances: machines: 900 at once, of a budget that holds 800"):
        take(LAUNCHED_MACHINES, full(LAUNCHED_MACHINES, NOW), NOW, 900)


def test_calls_without_a_bucket_of_their_own_share_one() -> None:
    names = ("DescribeInstances", "GetSpotPlacementScores", "DeleteVolume", "RunInstances")
    assert [bucket_of(name) for name in names] == [DESCRIBE, DESCRIBE, MUTATING, "RunInstances"]


@pytest.mark.parametrize(
    ("machines", "describe", "topology"), [(100, 1.8, 0.07), (1000, 1.8, 0.67), (10_000, 12.6, 6.7)]
)
def test_a_quiet_region_uses_little_of_what_is_allowed(machines: int, describe: float, topology: float) -> None:
    calls = steady_calls(machines)
    assert calls == {DESCRIBE: pytest.approx(describe), "DescribeInstanceTopology": pytest.approx(topology, rel=0.05)}
    for name, a_minute in calls.items():
        assert a_minute <= 0.2 * 60 * RATES[name].per_s


STEPS = st.lists(
    st.tuples(st.floats(-5, 30), st.sampled_from([0.5, 1, 1, 1, 2]), st.integers(0, 9)), min_size=1, max_size=60
)


@given(st.sampled_from(sorted(RATES)), STEPS)
def test_ec2_would_have_allowed_whatever_is_taken(name: str, steps: list[tuple[float, float, int]]) -> None:
    """Whether a clock steps back, or EC2 throttles: against a bucket as EC2 keeps it."""
    rate = RATES[name]
    ours, now, latest, theirs = full(name, NOW), NOW, NOW, rate.size
    for seconds, amount, chance in steps:
        now += timedelta(seconds=seconds)
        theirs = min(rate.size, theirs + max(0.0, (now - latest).total_seconds()) * rate.per_s)
        latest = max(now, latest)
        if chance == 0:
            ours = throttled(name, ours, now)
        if amount > max(1.0, OWN_SHARE * rate.size):
            continue
        answer = take(name, ours, now, amount)
        ours = answer.bucket
        if isinstance(answer, Taken):
            theirs -= amount
            assert theirs >= -1e-6


@given(st.sampled_from(sorted(RATES)), STEPS)
def test_at_the_time_that_is_named_there_is_enough(name: str, steps: list[tuple[float, float, int]]) -> None:
    bucket, now = full(name, NOW), NOW
    for seconds, amount, chance in steps:
        now += timedelta(seconds=abs(seconds))
        if chance == 0:
            bucket = throttled(name, bucket, now)
        if amount > max(1.0, OWN_SHARE * RATES[name].size):
            continue
        answer = take(name, bucket, now, amount)
        if isinstance(answer, NotBefore):
            assert answer.at > now
            assert isinstance(take(name, answer.bucket, answer.at, amount), Taken)
        bucket = answer.bucket
