"""The cap on launches: how many machines and dollars an hour, and when there is room again."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.caps import CapRefusal, Launch, LaunchCap, cap_refusal
from tests.fleet.planning.fleets import NOW, ago

CAP = LaunchCap(machines=4, price_per_hour=100.0)
HOUR = timedelta(hours=1)


def test_within_both_bounds_is_launched() -> None:
    assert cap_refusal(2, 25.0, [Launch(ago(60), 2, 25.0)], CAP, NOW) is None


def test_too_many_machines_wait_until_others_are_an_hour_old() -> None:
    launches = [Launch(ago(3000), 1, 1.0), Launch(ago(1800), 3, 1.0), Launch(ago(3601), 4, 1.0)]
    assert cap_refusal(2, 1.0, launches, CAP, NOW) == CapRefusal(
        "4 machines were launched within an hour, and 2 more would pass the cap of 4", ago(1800) + HOUR
    )


def test_what_can_never_fit_does_not_wait() -> None:
    assert cap_refusal(5, 1.0, [], CAP, NOW) == CapRefusal(
        "0 machines were launched within an hour, and 5 more would pass the cap of 4", None
    )


def test_too_much_money_is_refused() -> None:
    assert cap_refusal(1, 98.32, [Launch(ago(60), 1, 21.5)], CAP, NOW) == CapRefusal(
        "machines for 21.50 dollars an hour were launched within an hour, and 98.32 more would pass the cap of 100.00",
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
