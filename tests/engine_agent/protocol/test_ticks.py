"""All loops of a process wait for the same ticks."""

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.ticks import TICK_S, seconds_to_tick


@given(st.floats(0.0, 1e6), st.floats(0.0, 0.9))
def test_two_loops_that_wait_wake_together(now_s: float, later_s: float) -> None:
    one, other = now_s + seconds_to_tick(now_s), now_s + later_s + seconds_to_tick(now_s + later_s)
    assert 0.0 < one - now_s <= TICK_S + 0.02
    assert min((other - one) % TICK_S, TICK_S - (other - one) % TICK_S) < 1e-6


def test_a_loop_that_woke_a_little_early_does_not_wake_again() -> None:
    early_s = seconds_to_tick(0.0) - 0.001
    assert seconds_to_tick(early_s) > 0.9
