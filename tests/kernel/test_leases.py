"""Leases on real PostgreSQL: one holder at a time, and a token that fences the one before."""

from datetime import timedelta

import pytest

from kernel.leases import lease_held_since, lease_release, lease_take
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def take(holder: str, *, at_s: float = 0, ttl_s: float = 10) -> int | None:
    return lease_take(name="job", holder=holder, ttl_s=ttl_s, now=NOW + timedelta(seconds=at_s))


def test_a_free_lease_is_taken_and_held_against_others() -> None:
    assert take("a") == 1
    assert take("b", at_s=9) is None


def test_the_holder_renews_without_a_new_token_or_a_gap() -> None:
    take("a")
    assert take("a", at_s=8) == 1
    assert take("b", at_s=15) is None
    assert lease_held_since(name="job", now=NOW + timedelta(seconds=15)) == NOW


def test_an_expired_lease_changes_hands_with_a_higher_token() -> None:
    take("a")
    assert take("b", at_s=10) == 2
    assert take("a", at_s=11) is None


def test_a_holder_that_comes_back_after_a_gap_gets_a_new_token_and_a_new_beginning() -> None:
    take("a")
    assert take("a", at_s=20) == 2
    assert lease_held_since(name="job", now=NOW + timedelta(seconds=21)) == NOW + timedelta(seconds=20)


def test_a_released_lease_is_free_at_once_and_its_token_goes_on() -> None:
    take("a")
    lease_release(name="job", holder="b", now=NOW)
    assert take("b") is None
    lease_release(name="job", holder="a", now=NOW)
    assert lease_held_since(name="job", now=NOW) is None
    assert take("b") == 2
