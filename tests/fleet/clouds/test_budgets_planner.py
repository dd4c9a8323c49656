"""The call budget stays within EC2's bucket, always refills, and halves after throttling. The launch cap counts
machines and dollars an hour. Topology calls cover every machine soon and none too often."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.clouds.planning.call_budget import (
    DESCRIBE,
    LAUNCHED_MACHINES,
    MUTATING,
    OWN_SHARE,
    RATES,
    TOPOLOGY_PAGE,
    Bucket,
    NotBefore,
    PlacedMachine,
    Taken,
    bucket_of,
    full,
    path_of,
    steady_calls,
    take,
    throttled,
    topology_batches,
)
from fleet.clouds.planning.launches import CapRefusal, Launch, LaunchCap, cap_refusal
from fleet.placement.planning.distance import distance
from tests.fleet.fleets import NOW, ago


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
    with pytest.raises(ValueError, match="RunInstances: machines: 900 in one call, with a budget that holds 800"):
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
    """Compares with EC2's bucket, while clocks step back and EC2 throttles."""
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


CAP = LaunchCap(machines=4, price_per_hour=100.0)
HOUR = timedelta(hours=1)


def test_within_both_bounds_is_launched() -> None:
    assert cap_refusal(2, 25.0, [Launch(ago(60), 2, 25.0)], CAP, NOW) is None


def test_too_many_machines_wait_until_others_are_an_hour_old() -> None:
    launches = [Launch(ago(3000), 1, 1.0), Launch(ago(1800), 3, 1.0), Launch(ago(3601), 4, 1.0)]
    assert cap_refusal(2, 1.0, launches, CAP, NOW) == CapRefusal(
        "4 machines were launched within an hour, and 2 more would exceed the cap of 4", ago(1800) + HOUR
    )


def test_what_can_never_fit_does_not_wait() -> None:
    assert cap_refusal(5, 1.0, [], CAP, NOW) == CapRefusal(
        "0 machines were launched within an hour, and 5 more would exceed the cap of 4", None
    )


def test_too_much_money_is_refused() -> None:
    assert cap_refusal(1, 98.32, [Launch(ago(60), 1, 21.5)], CAP, NOW) == CapRefusal(
        "machines for 21.50 dollars an hour were launched within an hour, "
        "and 98.32 more would exceed the cap of 100.00",
        ago(60) + HOUR,
    )


def test_an_unknown_price_is_refused_only_where_prices_are_bounded() -> None:
    refusal = cap_refusal(1, None, [], CAP, NOW)
    assert refusal is not None
    assert refusal.until is None
    assert cap_refusal(1, None, [], LaunchCap(machines=4), NOW) is None


ASKED = st.tuples(st.floats(0, 600), st.integers(1, 3), st.sampled_from([0.0, 1.5, 21.5, 98.32]))


@given(st.lists(ASKED, max_size=30))
def test_no_hour_ever_holds_more_than_the_cap(asked: list[tuple[float, int, float]]) -> None:
    launches: list[Launch] = []
    now = NOW
    for seconds, count, price in asked:
        now += timedelta(seconds=seconds)
        if cap_refusal(count, price, launches, CAP, now) is None:
            launches.append(Launch(now, count, price))
    for first in launches:
        window = [one for one in launches if first.at <= one.at < first.at + HOUR]
        assert sum(one.count for one in window) <= CAP.machines
        assert sum(one.count * (one.price_per_hour or 0) for one in window) <= 100.001  # sums of floats


@given(st.lists(ASKED, max_size=6), st.integers(1, 4), st.sampled_from([1.0, 25.0]))
def test_at_the_time_that_is_named_there_is_room(
    before: list[tuple[float, int, float]], count: int, price: float
) -> None:
    launches = [Launch(ago(seconds * 5), number, cost) for seconds, number, cost in before]
    now = NOW
    for _ in range(20):
        refusal = cap_refusal(count, price, launches, CAP, now)
        if refusal is None:
            return
        assert refusal.until is not None
        assert refusal.until > now
        now = refusal.until
    pytest.fail("it was never launched")


FULL = ("use1-az1", "nn-1", "nn-2", "nn-3")


def test_a_path_is_the_zone_then_what_is_known_below_it() -> None:
    assert path_of("use1-az1", ["nn-1", "nn-2", "nn-3"]) == FULL
    assert path_of("use1-az1", []) == path_of("use1-az1", [""], "cb-1") == ("use1-az1",)
    assert path_of("use1-az1", ["nn-1"], "cb-1") == ("use1-az1", "nn-1", "cb-1")
    unknown = path_of("use1-az1", [])
    assert distance(unknown, unknown, 4) == 3, "only their zone is shared: below it nobody knows"


def test_those_never_asked_for_come_first_then_the_unknown_and_then_the_known() -> None:
    machines = [
        PlacedMachine("known", ago(9000), ago(901), FULL),
        PlacedMachine("fresh", ago(9000), ago(899), FULL),
        PlacedMachine("unknown", ago(100), ago(61), FULL[:1]),
        PlacedMachine("just asked", ago(100), ago(59)),
        PlacedMachine("new", ago(5)),
    ]
    assert topology_batches(machines, NOW) == (("new", "unknown", "known"),)


def test_what_stays_unknown_is_asked_for_half_as_often_each_time_but_every_15_minutes() -> None:
    asked, moments, now = None, [], ago(0)
    for _ in range(7200):
        if topology_batches([PlacedMachine("i", ago(0), asked)], now):
            asked = now
            moments.append(int((now - ago(0)).total_seconds()))
        now += timedelta(seconds=1)
    assert moments == [0, 60, 120, 240, 480, 960, 1860, 2760, 3660, 4560, 5460, 6360]


@given(st.integers(0, 450))
def test_all_that_join_are_asked_for_once_in_as_few_calls_as_there_can_be(count: int) -> None:
    machines = [PlacedMachine(f"i-{number}", NOW) for number in range(count)]
    asked = topology_batches(machines, NOW)
    assert len(asked) == -(-count // TOPOLOGY_PAGE)
    assert sorted(name for batch in asked for name in batch) == sorted(machine.id for machine in machines)
