"""What a minute of samples says of a region."""

import pytest

from traffic.planning.load_window import (
    SAMPLES_MAX,
    Sample,
    arrivals_to_expect,
    capacity_to_count_on,
    is_starting,
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
