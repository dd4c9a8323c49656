"""Lists and ends logins. A session without a row in Django's table is rejected. A session ends when it is unused for a
while or reaches its maximum lifetime."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

from django.conf import settings
from django.contrib.auth import logout
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in, user_logged_out
from django.db import transaction
from django.dispatch import receiver
from django.http import HttpRequest

from accounts.models import LoginSession
from kernel import clock, live
from kernel.events import event_record

SEEN_EVERY_S = 60
"""Precision of `seen_at`; a finer one would write a row at every request."""
SEEN = "_seen_s"
BEGAN = "_login_at_s"
METHOD = "_login_method"
FACTOR = "_factor_shown"
"""Key in the session: a second factor was shown in it. Removing a factor ends the sessions."""


def session_begin(*, request: HttpRequest, user: User, now: datetime) -> None:
    """Record a login. The view stores the method in the session; the default is a password."""
    if request.session.session_key is None:
        request.session.save()
    LoginSession.objects.filter(expires_at__lte=now).delete()
    LoginSession.objects.update_or_create(
        session_key=request.session.session_key,
        defaults={
            "user": user,
            "method": str(request.session.get(METHOD, "password"))[:16],
            "address": str(request.META.get("REMOTE_ADDR") or "")[:64],
            "browser": str(request.META.get("HTTP_USER_AGENT") or "").replace("\x00", "\ufffd")[:200],
            "created_at": now,
            "seen_at": now,
            "expires_at": _expires_at(request, now, now),
            "factor_at": now if request.session.get(FACTOR) else None,
        },
    )
    request.session[SEEN] = request.session[BEGAN] = now.timestamp()


def session_is_over(*, request: HttpRequest, now: datetime) -> bool:
    """Whether a session has reached its maximum lifetime; one without a start time has."""
    began_s = float(request.session.get(BEGAN, 0.0))
    return now.timestamp() - began_s >= settings.SESSION_LONGEST_S


def session_seen(*, request: HttpRequest, now: datetime) -> None:
    """Record the use of a session, at most once per `SEEN_EVERY_S`."""
    if now.timestamp() - float(request.session.get(SEEN, 0.0)) < SEEN_EVERY_S:
        return
    request.session[SEEN] = now.timestamp()
    began = datetime.fromtimestamp(float(request.session.get(BEGAN, 0.0)), UTC)
    until = _expires_at(request, began, now)
    LoginSession.objects.filter(session_key=request.session.session_key).update(seen_at=now, expires_at=until)


def session_factor_shown(*, request: HttpRequest, now: datetime) -> None:
    """Record that a second factor was shown now."""
    request.session[FACTOR] = True
    LoginSession.objects.filter(session_key=request.session.session_key).update(factor_at=now)


def session_renew(*, request: HttpRequest, user: User, has_factor: bool, now: datetime) -> None:
    """Continue under a new key after all sessions of the user ended, including this one. Callers have checked a fresh
    second factor or login."""
    request.session[FACTOR] = has_factor
    request.session.cycle_key()
    session_begin(request=request, user=user, now=now)


@transaction.atomic
def session_end(*, session: LoginSession, actor: str, now: datetime) -> None:
    _delete_sessions([session.session_key])
    message = f"a session of {session.user.get_username()} ended by {actor}"
    event_record(kind="session.ended", message=message, now=now, actor=actor)


@transaction.atomic
def sessions_end(*, user: User, actor: str, now: datetime) -> int:
    """End every login of a user. Returns how many there were."""
    keys = list(LoginSession.objects.filter(user=user).values_list("session_key", flat=True))
    _delete_sessions(keys)
    if keys:
        message = f"{len(keys)} sessions of {user.get_username()} ended by {actor}"
        event_record(kind="session.ended", message=message, now=now, actor=actor)
    return len(keys)


TENANT_LOGIN = "_tenant_login"
TENANT_LASTS_S = 8 * 3600.0
"""A working day. The provider's groups are read again at the next login."""


@dataclass(frozen=True, slots=True)
class TenantLogin:
    """A login for the page of a tenant, without a user of the console. `groups`: those at the provider that were mapped
    to tenants; the mapping is read again at each request."""

    issuer: str
    name: str
    groups: tuple[str, ...]
    began_s: float


def tenant_session_begin(*, request: HttpRequest, login: TenantLogin, tenants: list[str], now: datetime) -> None:
    """Begin a session that opens pages of tenants only. A session of the console in this browser ends."""
    logout(request)
    request.session[TENANT_LOGIN] = asdict(login)
    message = f"{login.name} logged in by {login.issuer} for {', '.join(tenants)}"
    event_record(kind="tenant.login", message=message, now=now, actor="tenant", detail={"tenants": tenants})


def tenant_session_end(*, request: HttpRequest) -> None:
    request.session.pop(TENANT_LOGIN, None)


def tenant_login_of(request: HttpRequest, issuer: str, now: datetime) -> TenantLogin | None:
    """Returns the login for tenants in this session. None without one, after `TENANT_LASTS_S`, or if the provider is no
    longer `issuer`."""
    stored = request.session.get(TENANT_LOGIN)
    if not isinstance(stored, dict):
        return None
    login = TenantLogin(stored["issuer"], stored["name"], tuple(stored["groups"]), stored["began_s"])
    is_valid = bool(issuer) and login.issuer == issuer and 0 <= now.timestamp() - login.began_s < TENANT_LASTS_S
    return login if is_valid else None


def session_forget(*, session_key: str | None) -> None:
    """After a logout, close the WebSockets of the browser's other tabs."""
    if LoginSession.objects.filter(session_key=session_key or "").delete()[0]:
        live.push_goodbye(session_key or "")


def _expires_at(request: HttpRequest, began: datetime, now: datetime) -> datetime:
    unused = now + timedelta(seconds=request.session.get_expiry_age())
    return min(unused, began + timedelta(seconds=settings.SESSION_LONGEST_S))


def _delete_sessions(keys: list[str]) -> None:
    store: Any = import_module(settings.SESSION_ENGINE).SessionStore
    for key in keys:
        store(key).delete()
        live.push_goodbye(key)
    LoginSession.objects.filter(session_key__in=keys).delete()


@receiver(user_logged_in)
def _logged_in(sender: Any, request: HttpRequest, user: User, **_: Any) -> None:
    session_begin(request=request, user=user, now=clock.now())


@receiver(user_logged_out)
def _logged_out(sender: Any, request: HttpRequest, **_: Any) -> None:
    session_forget(session_key=request.session.session_key)
