"""The token bucket that limits one peer."""

from fleet.consumers.token_bucket import TokenBucket


def test_a_burst_is_allowed_and_then_the_rate() -> None:
    bucket = TokenBucket(per_s=2, burst=3, now=0)
    assert [bucket.take(0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(0.4)
    assert bucket.take(0.6)


def test_what_weighs_more_takes_more() -> None:
    bucket = TokenBucket(per_s=10, burst=100, now=0)
    assert [bucket.take(0, 60) for _ in range(2)] == [True, False]
    assert bucket.take(2, 60)


def test_what_is_not_used_is_saved_up_to_the_burst_only() -> None:
    bucket = TokenBucket(per_s=10, burst=2, now=0)
    assert [bucket.take(1000) for _ in range(3)] == [True, True, False]
