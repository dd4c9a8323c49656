"""Two logins with one code, at the same moment, in two transactions: one gets in."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction

from accounts import one_time_codes
from accounts.models import KeyChallenge, RecoveryCode, SecondFactor
from accounts.security_keys import GET, Site
from accounts.services.login import FactorAttempt, LoginLimited
from accounts.services.second_factor import (
    MOST_WRONG_IN_A_ROW,
    Shown,
    factor_check,
    key_ceremony,
    recovery_codes_issue,
)
from kernel import clock
from tests.accounts.factors import code_of, wrong_code
from tests.accounts.software_key import SoftwareKey
from tests.fleet.rows import NOW

SITE = Site("http://localhost", "localhost")


def user_with_app() -> tuple[User, str]:
    user, secret = User.objects.create_user("ada"), one_time_codes.app_secret()
    sealed = one_time_codes.encrypted_secret(secret, user.pk, NOW)
    SecondFactor.objects.create(user=user, kind="app", name="phone", secret=sealed, created_at=NOW)
    return user, secret


def check(user: User, code: str) -> bool:
    attempt = FactorAttempt(user.pk)
    return factor_check(user=user, site=SITE, shown=Shown(code), attempt=attempt, now=clock.now())


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["app", "recovery code"])
def test_of_two_logins_with_one_code_one_gets_in(kind: str) -> None:
    user, secret = user_with_app()
    code = code_of(secret) if kind == "app" else recovery_codes_issue(user=user, now=NOW)[0]
    together = Barrier(2, timeout=60)

    def logs_in(_: int) -> bool:
        try:
            with transaction.atomic():
                User.objects.filter(pk=user.pk).first()
                together.wait()
                return check(user, code)
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(logs_in, range(2))) == [False, True]


@pytest.mark.django_db(transaction=True)
def test_guesses_side_by_side_see_each_other() -> None:
    user, secret = user_with_app()
    wrong, together = wrong_code(secret), Barrier(4, timeout=60)

    def guesses(_: int) -> int:
        limited = 0
        try:
            together.wait()
            for _ in range(4):
                try:
                    check(user, wrong)
                except LoginLimited:
                    limited += 1
        finally:
            connection.close()
        return limited

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(guesses, range(4))) == 6


@pytest.mark.django_db
def test_wrong_codes_in_a_row_close_an_app_and_a_right_one_forgives_those_before() -> None:
    user, secret = user_with_app()
    SecondFactor.objects.update(wrong_in_a_row=MOST_WRONG_IN_A_ROW - 1)
    assert check(user, code_of(secret))
    assert SecondFactor.objects.get().wrong_in_a_row == 0
    SecondFactor.objects.update(wrong_in_a_row=MOST_WRONG_IN_A_ROW - 1)
    assert not check(user, wrong_code(secret))
    assert not check(user, code_of(secret, 1))


@pytest.mark.django_db
def test_a_challenge_waits_for_five_minutes_and_for_its_user() -> None:
    user, key = User.objects.create_user("ada"), SoftwareKey()
    options = key_ceremony(user=user, site=SITE, ceremony=GET, now=NOW).options
    waiting = KeyChallenge.objects.get()
    assert waiting.expires_at == NOW + timedelta(minutes=5)
    eve = User.objects.create_user("eve")
    shown = Shown(credential=key.get(options))
    assert not factor_check(user=eve, site=SITE, shown=shown, attempt=FactorAttempt(eve.pk), now=NOW)
    late = NOW + timedelta(minutes=5)
    assert not factor_check(user=user, site=SITE, shown=shown, attempt=FactorAttempt(user.pk), now=late)
    assert KeyChallenge.objects.count() == 1
    key_ceremony(user=user, site=SITE, ceremony=GET, now=late)
    assert KeyChallenge.objects.count() == 1


@pytest.mark.django_db
def test_recovery_codes_are_stored_as_hashes() -> None:
    user, _ = user_with_app()
    codes = recovery_codes_issue(user=user, now=NOW)
    stored = "".join(RecoveryCode.objects.values_list("digest", flat=True))
    assert not [code for code in codes if code.replace("-", "") in stored]
