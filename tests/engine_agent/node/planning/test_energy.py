"""Energy counters that wrap, restart, stand still or are implausible are added up exactly, or refused and counted as
such."""

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.node.planning.energy import (
    LONGEST_MS,
    STILL_AFTER_MS,
    TOLERANCE,
    MeterState,
    Reading,
    Step,
    advance,
    step,
)
from engine_agent.protocol.telemetry_messages import EnergyMeter

WATTS = 700.0
SECOND = 1000


def at(microjoules: int, wraps_at: int | None = None) -> Reading:
    return Reading(microjoules=microjoules, most_watts=WATTS, wraps_at=wraps_at)


def began(*readings: Reading) -> MeterState:
    return MeterState.begin("nvidia", "accelerators", "a", dict(zip("xyz", readings, strict=False)), 0)


def test_what_grew_is_added_up_over_all_devices() -> None:
    state = advance(began(at(5), at(7)), {"x": at(300_000_005), "y": at(100_000_007)}, SECOND)
    assert state.meter == EnergyMeter("nvidia", "accelerators", "a", microjoules=400_000_000, covered_ms=SECOND)


def test_a_counter_that_wraps_goes_on() -> None:
    assert step(at(990, 1_000_000_000), at(10, 1_000_000_000), 500).wrong == "more than it can draw"
    assert step(at(999_000_000, 1_000_000_000), at(50_000_000, 1_000_000_000), SECOND) == Step(51_000_000)
    assert step(at(9, 1_000_000), at(8, 1_000_000), SECOND).wrong == "may have wrapped more than once"


def test_a_counter_that_restarts_is_refused_once_and_then_goes_on() -> None:
    state = advance(began(at(900_000_000)), {"x": at(5)}, SECOND)
    assert (state.meter.refused, state.meter.covered_ms) == (1, 0)
    state = advance(state, {"x": at(200_000_005)}, 2 * SECOND)
    assert (state.meter.refused, state.meter.covered_ms, state.meter.microjoules) == (1, SECOND, 200_000_000)


def test_a_counter_that_jumps_beyond_what_its_device_draws_is_refused() -> None:
    most = round(WATTS * TOLERANCE * SECOND * 1000)
    assert step(at(0), at(most), SECOND) == Step(most)
    assert step(at(0), at(most + 1), SECOND).wrong == "more than it can draw"
    assert step(at(0), at(1), LONGEST_MS + 1).wrong == "not read for too long"


def test_one_device_that_lies_refuses_the_time_of_all() -> None:
    state = advance(began(at(0), at(0)), {"x": at(300_000_000), "y": at(10**15)}, SECOND)
    assert (state.meter.microjoules, state.meter.covered_ms, state.meter.refused) == (0, 0, 1)
    without = advance(state, {"x": at(400_000_000)}, 2 * SECOND)
    assert (without.meter.covered_ms, without.meter.refused) == (0, 2)


def test_a_counter_that_stands_still_is_refused_after_a_while() -> None:
    state = began(at(5))
    for second in range(5, STILL_AFTER_MS // 1000 + 10, 5):
        state = advance(state, {"x": at(5)}, second * SECOND)
    assert (state.meter.covered_ms, state.meter.refused) == (STILL_AFTER_MS, 1)


def test_shares_of_power_are_averaged_over_devices() -> None:
    state = advance(began(Reading(share=0.1), Reading(share=0.1)), {"x": Reading(share=0.5), "y": Reading(share=0.3)},
                    5 * SECOND)  # fmt: skip
    assert (state.meter.full_power_ms, state.meter.covered_ms) == (2000, 5000)
    assert advance(state, {"x": Reading(share=9), "y": Reading(share=0)}, 6 * SECOND).meter.refused == 1
    assert advance(state, {"x": Reading(), "y": Reading(share=0.1)}, 6 * SECOND).meter.refused == 1


def test_a_look_that_is_repeated_changes_nothing() -> None:
    state = began(at(5))
    assert advance(state, {"x": at(9)}, 0) is state


RANGE = 10**12


@given(st.lists(st.integers(0, round(WATTS * 5 * 1_000_000)), max_size=40), st.integers(0, RANGE - 1))
def test_whatever_a_counter_drew_and_however_often_it_wrapped_the_sum_is_exact(drawn: list[int], first: int) -> None:
    state, total = began(at(first, RANGE)), first
    for number, amount in enumerate(drawn, 1):
        total += amount
        state = advance(state, {"x": at(total % RANGE, RANGE)}, number * 5 * SECOND)
    refused_ms = len(drawn) * 5 * SECOND - state.meter.covered_ms
    assert refused_ms == 5 * SECOND * state.meter.refused
    if not state.meter.refused:
        assert state.meter.microjoules == total - first


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**63)), max_size=40))
def test_whatever_a_counter_says_the_meter_never_tells_more_than_can_be(said: list[int | None]) -> None:
    state = began(at(0))
    for number, value in enumerate(said, 1):
        state = advance(state, {"x": Reading(microjoules=value, most_watts=WATTS)}, number * SECOND)
    assert 0 <= state.meter.microjoules <= WATTS * TOLERANCE * state.meter.covered_ms * 1000
    assert state.meter.covered_ms + SECOND * state.meter.refused == len(said) * SECOND
