"""Follows logins and logouts, whichever way they happen. Decides nothing."""

from typing import Any

from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in, user_logged_out
from django.dispatch import receiver
from django.http import HttpRequest

from accounts.services.session import session_begin, session_forget
from kernel import clock


@receiver(user_logged_in)
def _logged_in(sender: Any, request: HttpRequest, user: User, **_: Any) -> None:
    session_begin(request=request, user=user, now=clock.now())


@receiver(user_logged_out)
def _logged_out(sender: Any, request: HttpRequest, **_: Any) -> None:
    session_forget(session_key=request.session.session_key)
