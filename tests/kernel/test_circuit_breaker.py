"""The pause after a failure, by an injected clock."""

from kernel.circuit_breaker import CircuitBreaker


def test_it_is_closed_until_something_fails() -> None:
    assert not CircuitBreaker(pause_s=2, now_s=lambda: 0).is_open


def test_a_failure_opens_it_for_its_pause_and_no_longer() -> None:
    moments = iter([10.0, 11.9, 12.0])
    breaker = CircuitBreaker(pause_s=2, now_s=lambda: next(moments))
    breaker.trip()
    assert [breaker.is_open, breaker.is_open] == [True, False]
