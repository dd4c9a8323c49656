"""How many wrong passwords are heard. Time is an argument, so nothing waits."""

from datetime import timedelta

import pytest

from accounts.models import LoginFailure
from accounts.services.login import (
    Attempt,
    LoginLimit,
    login_failure_record,
    login_failures_forget,
    login_wait_s,
)
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

LIMIT = LoginLimit(failures_allowed=3, window_s=60)
ADA = Attempt(username="ada", address="10.0.0.1")


def fail(times: int, attempt: Attempt = ADA, after_s: float = 0) -> None:
    for _ in range(times):
        login_failure_record(attempt=attempt, now=NOW + timedelta(seconds=after_s), limit=LIMIT)


def wait_s(attempt: Attempt = ADA, after_s: float = 0) -> float:
    return login_wait_s(attempt=attempt, now=NOW + timedelta(seconds=after_s), limit=LIMIT)


def test_the_last_allowed_failure_closes_the_door_for_the_window() -> None:
    fail(2)
    assert wait_s() == 0
    fail(1)
    assert wait_s(after_s=20) == 40
    assert wait_s(after_s=60) == 0


def test_the_wait_counts_from_the_oldest_failure_that_matters() -> None:
    fail(1)
    fail(2, after_s=30)
    assert wait_s(after_s=40) == 20


@pytest.mark.parametrize("other", [Attempt("grace", "10.0.0.1"), Attempt("ada", "10.0.0.2")])
def test_another_user_or_address_is_not_held_back(other: Attempt) -> None:
    fail(3)
    assert wait_s(other) == 0


def test_the_case_of_the_user_name_makes_no_difference() -> None:
    fail(3)
    assert wait_s(Attempt("ADA", "10.0.0.1")) == 60


def test_a_good_login_forgets_the_failures() -> None:
    fail(3)
    login_failures_forget(attempt=ADA)
    assert wait_s() == 0


def test_old_failures_are_deleted_and_never_stored_in_clear() -> None:
    fail(2)
    fail(1, after_s=120)
    row = LoginFailure.objects.get()
    assert "ada" not in row.subject
