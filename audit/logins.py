"""Notes logins, failed logins and logouts in the trail of the request: their answers do not tell them apart.

A failed login counts as denied only for a name that somebody has: people type passwords into the wrong field.
"""

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.signals import user_logged_in, user_logged_out, user_login_failed

from kernel.trail import trail


def listen() -> None:
    """Connect to Django's signals, once."""
    user_logged_in.connect(_logged_in, dispatch_uid="audit-login")
    user_logged_out.connect(_logged_out, dispatch_uid="audit-logout")
    user_login_failed.connect(_failed, dispatch_uid="audit-login-failed")


def _logged_in(sender: Any, user: Any, **_: Any) -> None:
    _say("login", user.get_username())


def _logged_out(sender: Any, user: Any, **_: Any) -> None:
    if user is not None:
        _say("logout", user.get_username())


def _failed(sender: Any, credentials: dict[str, Any], **_: Any) -> None:
    name = str(credentials.get("username") or "").replace("\x00", "")
    if trail() is not None and get_user_model()._default_manager.filter(username=name).exists():
        _say("login-failed", name)


def _say(what: str, name: str) -> None:
    if (kept := trail()) is not None:
        kept.said = {"what": what, "name": name}
