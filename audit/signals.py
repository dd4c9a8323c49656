"""Logins, failed logins and logouts of the current request, whose response does not distinguish them.

A failed login is recorded only for an existing user name, because users type passwords into the wrong field."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed


@dataclass(slots=True)
class RequestLogin:
    """`action`: "login", "login-failed", "factor-failed" or "logout" of `username`, or ""."""

    action: str = ""
    username: str = ""

    def __bool__(self) -> bool:
        return bool(self.action)


_current: ContextVar[RequestLogin | None] = ContextVar("switchyard_login", default=None)


@contextmanager
def login_recording() -> Iterator[RequestLogin]:
    login = RequestLogin()
    token = _current.set(login)
    try:
        yield login
    finally:
        _current.reset(token)


def current_login() -> RequestLogin | None:
    """Returns that of the current request, or None outside a request."""
    return _current.get()


def connect() -> None:
    user_logged_in.connect(_logged_in, dispatch_uid="audit-login")
    user_logged_out.connect(_logged_out, dispatch_uid="audit-logout")
    user_login_failed.connect(_failed, dispatch_uid="audit-login-failed")


def _logged_in(sender: Any, user: Any, **_: Any) -> None:
    _record_login("login", user.get_username())


def _logged_out(sender: Any, user: Any, **_: Any) -> None:
    if user is not None:
        _record_login("logout", user.get_username())


def _failed(sender: Any, credentials: dict[str, Any], **_: Any) -> None:
    name = str(credentials.get("username") or "").replace("\x00", "")
    if current_login() is not None and get_user_model()._default_manager.filter(username=name).exists():
        _record_login("factor-failed" if credentials.get("second_factor") else "login-failed", name)


def _record_login(action: str, username: str) -> None:
    if (login := current_login()) is not None:
        login.action, login.username = action, username
