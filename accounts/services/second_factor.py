"""Enrols, checks and removes second factors. Each user's row is locked first, so a code works for only one of two
logins, and concurrent guesses are counted.

Adding or removing a factor ends the existing sessions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F

from accounts import one_time_codes, security_keys
from accounts.models import FactorKind, KeyChallenge, RecoveryCode, SecondFactor
from accounts.security_keys import CREATE, GET, Ceremony, KeyFault, Site
from accounts.services.login import FactorAttempt, LoginLimited, attempt_count, attempt_forget
from accounts.services.session import sessions_end
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.secrets import secret_digest

MOST_FACTORS = 10
MOST_WRONG_IN_A_ROW = 100
"""Consecutive wrong codes until an app's factor is locked (NIST SP 800-63B, 5.2.2)."""
CHALLENGE_TIME = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Shown:
    """The input of a form: a code of an app, a recovery code, or a browser's response for a security key."""

    code: str = ""
    credential: str = ""


def app_enrol(*, user: User, sealed: str, code: str, name: str, now: datetime) -> tuple[str, ...]:
    """Enrol an app that showed a right code of the secret in `sealed`. Returns recovery codes for the first factor.
    Raises InvalidInput if the code is wrong, or the secret has expired. Raises Conflict if the user has too many
    factors."""
    secret = one_time_codes.decrypted_secret(sealed, user.pk) if one_time_codes.is_recent(sealed, now) else ""
    if not secret:
        raise InvalidInput(field="secret", rule="recent", message="this QR code has expired; start again")
    step = one_time_codes.matching_step(secret, one_time_codes.typed(code), now, after=0)
    if step is None:
        message = "the code is wrong; type the one that the app shows now, and check the clock of its device"
        raise InvalidInput(field="one_time_code", rule="right", message=message)
    columns = {"secret": one_time_codes.encrypted_secret(secret, user.pk, now), "last_count": step}
    return _add(user, FactorKind.APP, name, now, columns)


def key_enrol(*, user: User, site: Site, response: str, name: str, now: datetime) -> tuple[str, ...]:
    """Enrol a security key that signed the challenge of `key_ceremony`. Returns recovery codes for the first factor.
    Raises InvalidInput if the response is rejected. Raises Conflict if the user has too many factors, or this one
    already."""

    def enrolled(challenge: str, parsed: Mapping[str, Any]) -> dict[str, Any]:
        credential, counter = security_keys.enrolled(site, challenge, parsed)
        return {"credential": credential, "last_count": counter}

    with transaction.atomic():
        try:
            columns = _answered(user, CREATE, response, now, enrolled)
        except KeyFault as fault:
            message = f"the security key was not added: {fault}"
            raise InvalidInput(field="credential", rule="right", message=message) from fault
        return _add(user, FactorKind.KEY, name, now, columns)


def key_ceremony(*, user: User, site: Site, ceremony: str, now: datetime) -> Ceremony:
    """Returns the options for a browser; their challenge is valid once."""
    known = list(_keys(user).values_list("credential", flat=True))
    if ceremony == CREATE:
        begun = security_keys.enrolment(site, user.pk, user.get_username(), known)
    else:
        begun = security_keys.showing(site, known)
    KeyChallenge.objects.filter(expires_at__lte=now).delete()
    KeyChallenge.objects.create(
        user=user, ceremony=ceremony, challenge=begun.challenge, expires_at=now + CHALLENGE_TIME
    )
    return begun


@transaction.atomic
def factor_check(*, user: User, site: Site, shown: Shown, attempt: FactorAttempt, now: datetime) -> bool:
    """Whether this is a valid second factor of the user, each only once. The attempt is counted first; a right one
    clears the count. Raises LoginLimited after too many wrong attempts."""
    _locked(user)
    wait_s = attempt_count(attempt=attempt, now=now)
    if wait_s > 0:
        raise LoginLimited(wait_s, "too many wrong codes; try again in a few minutes")
    if shown.credential:
        is_right = _check_key(user, site, shown.credential, now)
    else:
        code = one_time_codes.typed(shown.code)
        is_right = _check_app(user, code, now) or _use_recovery_code(user, code, now)
    if is_right:
        attempt_forget(attempt=attempt, at=now)
    return is_right


@transaction.atomic
def factor_remove(*, user: User, factor_id: int, now: datetime) -> None:
    """Remove one factor of a user; removing the last one deletes the recovery codes. Raises SecondFactor.DoesNotExist
    if the user has no such factor."""
    _locked(user)
    factor = SecondFactor.objects.get(user=user, pk=factor_id)
    message = f"{factor} removed"
    factor.delete()
    if not SecondFactor.objects.filter(user=user).exists():
        RecoveryCode.objects.filter(user=user).delete()
    _changed(user, "removed", message, user.get_username(), now)


@transaction.atomic
def second_factors_remove(*, username: str, actor: str, now: datetime) -> User:
    """Remove all factors of a user who lost them, and end the sessions. Raises Conflict if the user has none."""
    user = _locked(User.objects.get(username=username))
    RecoveryCode.objects.filter(user=user).delete()
    if SecondFactor.objects.filter(user=user).delete()[0] == 0:
        raise Conflict(f"{username} has no second factor")
    _changed(user, "removed", f"all second factors of {username} removed by {actor}", actor, now)
    return user


@transaction.atomic
def recovery_codes_issue(*, user: User, now: datetime) -> tuple[str, ...]:
    """Returns new recovery codes, which are shown only now. Earlier ones become invalid."""
    _locked(user)
    message = f"new recovery codes for {user.get_username()}"
    event_record(kind="second_factor.recovery", message=message, now=now, actor=user.get_username())
    return _new_codes(user)


def _add(user: User, kind: FactorKind, name: str, now: datetime, columns: Mapping[str, Any]) -> tuple[str, ...]:
    with transaction.atomic():
        _locked(user)
        known = SecondFactor.objects.filter(user=user)
        if known.count() >= MOST_FACTORS:
            raise Conflict(f"you have {MOST_FACTORS} second factors already; remove one first")
        credential = columns.get("credential")
        if credential and credential in known.values_list("credential", flat=True):
            raise Conflict("this security key is enrolled already")
        is_first = not known.exists()
        factor = SecondFactor.objects.create(
            user=user, kind=kind.value, name=name.strip()[:64] or kind.described, created_at=now, **columns
        )
        _changed(user, "added", f"{factor} added", user.get_username(), now)
        return _new_codes(user) if is_first else ()


def _changed(user: User, what: str, message: str, actor: str, now: datetime) -> None:
    event_record(kind=f"second_factor.{what}", message=message, now=now, actor=actor)
    sessions_end(user=user, actor=actor, now=now)


def _new_codes(user: User) -> tuple[str, ...]:
    codes = one_time_codes.recovery_codes()
    RecoveryCode.objects.filter(user=user).delete()
    digests = [secret_digest(one_time_codes.typed(code)) for code in codes]
    RecoveryCode.objects.bulk_create([RecoveryCode(user=user, digest=digest) for digest in digests])
    return codes


def _check_app(user: User, code: str, now: datetime) -> bool:
    if len(code) != 6 or not code.isdigit():
        return False
    apps = SecondFactor.objects.filter(user=user, kind=FactorKind.APP.value, wrong_in_a_row__lt=MOST_WRONG_IN_A_ROW)
    for app in apps:
        secret = one_time_codes.decrypted_secret(app.secret, user.pk)
        step = one_time_codes.matching_step(secret, code, now, after=app.last_count) if secret else None
        if step is not None:
            return _used(app, step, now)
    apps.update(wrong_in_a_row=F("wrong_in_a_row") + 1)
    return False


def _use_recovery_code(user: User, code: str, now: datetime) -> bool:
    if not RecoveryCode.objects.filter(user=user, digest=secret_digest(code)).delete()[0]:
        return False
    left = RecoveryCode.objects.filter(user=user).count()
    message = f"{user.get_username()} used a recovery code; {left} left"
    event_record(kind="second_factor.recovery", message=message, now=now, actor=user.get_username())
    return True


def _check_key(user: User, site: Site, response: str, now: datetime) -> bool:
    keys = {key.credential: key for key in _keys(user)}

    def used(challenge: str, parsed: Mapping[str, Any]) -> bool:
        credential, counter = security_keys.shown(site, challenge, list(keys), parsed)
        key = keys[credential]
        if counter <= key.last_count and (counter or key.last_count):
            raise KeyFault("its counter decreased: there may be a copy of this key")
        return _used(key, counter, now)

    try:
        return bool(_answered(user, GET, response, now, used))
    except KeyFault:
        return False


def _answered(
    user: User, ceremony: str, response: str, now: datetime, check: Callable[[str, Mapping[str, Any]], Any]
) -> Any:
    """Returns the result of `check` for a response to a challenge of this user, which is valid once."""
    parsed = security_keys.read_response(response)
    challenge = security_keys.challenge_in(parsed)
    waiting = KeyChallenge.objects.filter(user=user, ceremony=ceremony, challenge=challenge, expires_at__gt=now)
    if not waiting.delete()[0]:
        raise KeyFault("it does not answer an open challenge; try again")
    return check(challenge, parsed)


def _used(factor: SecondFactor, count: int, now: datetime) -> bool:
    SecondFactor.objects.filter(pk=factor.pk).update(last_count=count, wrong_in_a_row=0, last_used_at=now)
    return True


def _keys(user: User) -> Any:
    return SecondFactor.objects.filter(user=user, kind=FactorKind.KEY.value)


def _locked(user: User) -> User:
    return User.objects.select_for_update(no_key=True).get(pk=user.pk)
