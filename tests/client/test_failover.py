import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchyard_client import Attempt, Failover, Retries

RETRIES = Retries(attempts=4, longest_wait_s=10.0, rest_s=5.0)


def test_home_comes_first_and_who_failed_last_until_it_has_rested() -> None:
    failover = Failover(3, RETRIES)
    assert failover.order(100.0) == [0, 1, 2]
    failover.failed(0, 100.0)
    assert failover.order(104.9) == [1, 2, 0]
    assert failover.order(105.0) == [0, 1, 2]


def test_who_fails_again_rests_twice_as_long_and_not_longer_than_anybody_waits() -> None:
    failover = Failover(2, RETRIES)
    for now, until in ((0.0, 5.0), (10.0, 20.0), (30.0, 40.0)):
        failover.failed(0, now)
        assert failover.order(until - 0.1) == [1, 0]
        assert failover.order(until) == [0, 1]
    failover.answered(0)
    failover.failed(0, 50.0)
    assert failover.order(55.0) == [0, 1]


def test_silence_goes_to_another_region_at_once_and_back_after_a_moment() -> None:
    failover = Failover(2, RETRIES)
    failover.failed(0, 0.0)
    assert failover.after_silence([0], 0.0) == Attempt(1)
    failover.failed(1, 0.0)
    assert failover.after_silence([0, 1], 0.0) == Attempt(0, 0.4)


@pytest.mark.parametrize(
    ("status", "retry_after_s", "then"),
    [
        (503, 2.0, Attempt(1)),  # it has no capacity: another one may
        (503, None, None),  # it does not say that it helps to come back
        (429, 2.0, Attempt(0, 2.0)),  # the key's limit is everywhere
        (429, 60.0, None),  # longer than the maximum wait
        (400, None, None),
    ],
)
def test_a_refusal_says_whether_to_come_back(status: int, retry_after_s: float | None, then: Attempt | None) -> None:
    assert Failover(2, RETRIES).after_refusal([0], 0, status, retry_after_s, 0.0) == then


def test_the_only_region_is_waited_for() -> None:
    assert Failover(1, RETRIES).after_refusal([0], 0, 503, 2.0, 0.0) == Attempt(0, 2.0)


outcomes = st.one_of(st.none(), st.tuples(st.sampled_from([400, 429, 503]), st.none() | st.floats(0, 100)))


@given(st.integers(1, 4), st.lists(outcomes, min_size=20, max_size=20), st.floats(0, 1e6))
def test_a_call_ends_tries_no_more_than_its_attempts_and_waits_no_longer_than_its_bound(
    regions: int, answers: list[tuple[int, float | None] | None], now: float
) -> None:
    failover, tried = Failover(regions, RETRIES), list[int]()
    attempt: Attempt | None = Attempt(failover.order(now)[0])
    for answer in answers:
        if attempt is None:
            break
        assert 0 <= attempt.region < regions
        assert 0 <= attempt.wait_s <= RETRIES.longest_wait_s
        now += attempt.wait_s
        tried.append(attempt.region)
        if answer is None:
            failover.failed(attempt.region, now)
            attempt = failover.after_silence(tried, now)
        else:
            attempt = failover.after_refusal(tried, attempt.region, *answer, now)
    assert attempt is None
    assert len(tried) <= RETRIES.attempts
    assert sorted(failover.order(now)) == list(range(regions))
