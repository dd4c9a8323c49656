"""How many wrong passwords are heard. Time is an argument, so nothing waits."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounts.models import LoginFailure
from accounts.services.login import LIMITS, Attempt, LoginLimits, attempt_count, attempt_forget, login_name
from tests.fleet.rows import NOW

SMALL = LoginLimits(of_name_and_address=3, of_address=5, of_name=6, of_all=8, of_device=3, window_s=60)
FULL_WIDTH = "".join(chr(ord(letter) + 0xFEE0) for letter in "operator")
ADA = Attempt(username="ada", address="10.0.0.1")


def wait_s(attempt: Attempt = ADA, after_s: float = 0) -> float:
    """Of one more attempt, which is counted if it is heard."""
    return attempt_count(attempt=attempt, now=NOW + timedelta(seconds=after_s), limits=SMALL)


@pytest.mark.django_db
def test_the_last_allowed_attempt_closes_the_door_for_the_window() -> None:
    assert [wait_s() for _ in range(3)] == [0, 0, 0]
    assert wait_s(after_s=20) == 40
    assert wait_s(after_s=60) == 0


@pytest.mark.django_db
def test_what_was_refused_does_not_keep_the_door_closed() -> None:
    for _ in range(3):
        wait_s()
    assert [wait_s(after_s=second) for second in (10, 30, 50)] == [50, 30, 10]
    assert wait_s(after_s=60) == 0


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("attempts", "then"),
    [
        pytest.param([("ada", "10.0.0.1")] * 3, ("ADA", "10.0.0.1"), id="name and address, in capitals"),
        pytest.param([(f"user{n}", "10.0.0.1") for n in range(5)], ("grace", "10.0.0.1"), id="address"),
        pytest.param([("ada", f"10.0.1.{n}") for n in range(6)], ("ada", "10.0.0.9"), id="name"),
        pytest.param([(f"user{n}", f"10.0.1.{n}") for n in range(8)], ("grace", "10.0.0.9"), id="all"),
        pytest.param([("ada", f"2001:db8::{n}") for n in range(3)], ("ada", "2001:db8::ff"), id="one /64"),
        pytest.param([("ada", "::ffff:10.0.0.1")] * 3, ("ada", "10.0.0.1"), id="IPv4 in IPv6"),
    ],
)
def test_each_limit_holds(attempts: list[tuple[str, str]], then: tuple[str, str]) -> None:
    assert [wait_s(Attempt(*each)) for each in attempts] == [0.0] * len(attempts)
    assert wait_s(Attempt(*then)) == 60


@pytest.mark.django_db
@pytest.mark.parametrize("other", [Attempt("grace", "10.0.0.1"), Attempt("ada", "10.0.0.2")])
def test_another_user_or_address_is_not_held_back(other: Attempt) -> None:
    for _ in range(3):
        wait_s()
    assert wait_s(other) == 0


@pytest.mark.django_db
def test_strangers_do_not_keep_out_a_browser_that_was_here_before() -> None:
    for number in range(8):
        wait_s(Attempt("ada", f"10.0.1.{number}"))
    known = Attempt("ada", "10.0.0.1", device="d1")
    assert [wait_s(known) for _ in range(4)] == [0, 0, 0, 60]
    assert wait_s(Attempt("ada", "10.0.0.1", device="d2")) == 0


@pytest.mark.django_db
def test_a_good_login_forgets_the_wrong_ones_from_there_but_not_what_others_tried() -> None:
    for _ in range(3):
        wait_s()
    attempt_forget(attempt=ADA, at=NOW, limits=SMALL)
    assert wait_s() == 0
    for address in ("10.0.0.2", "10.0.0.3"):
        wait_s(Attempt("ada", address))
    later = NOW + timedelta(seconds=1)
    assert attempt_count(attempt=ADA, now=later, limits=SMALL) == 0
    attempt_forget(attempt=ADA, at=later, limits=SMALL)
    of_the_name = Attempt("ada", "10.0.0.2").counted(SMALL)
    assert (
        LoginFailure.objects.filter(subject=list(of_the_name)[2]).count() == 3
    )  # the own wrong attempt, and the attacker's


@pytest.mark.django_db
def test_old_attempts_are_deleted_and_never_stored_in_clear() -> None:
    wait_s()
    wait_s(after_s=120)
    assert LoginFailure.objects.count() == 4
    assert not any("ada" in row.subject or "10.0" in row.subject for row in LoginFailure.objects.all())


@pytest.mark.parametrize(
    "text", ["operator", " operator ", FULL_WIDTH, f"{FULL_WIDTH}\u3000", "operator\u00a0", "ⓞperator"]
)
def test_every_spelling_that_finds_a_user_counts_as_that_user(text: str) -> None:
    assert login_name(text) == "operator"


@given(st.text(max_size=40))
def test_what_is_tried_is_what_is_counted(text: str) -> None:
    """A name that is looked up is its own spelling, so it cannot be spelled otherwise and be counted elsewhere."""
    name = login_name(text)
    assert login_name(name) in {name, ""}
    assert "\x00" not in name
    assert (
        Attempt(name, "").counted(LIMITS) == Attempt(name.swapcase().casefold(), "").counted(LIMITS)
        or not name.isascii()
    )
