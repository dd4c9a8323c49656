"""Follows logins and logouts, whichever way they happen, and notes which sessions are used. Decides nothing."""

from collections.abc import Callable
from typing import Any

from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in, user_logged_out
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse

from accounts.services.session import session_begin, session_forget, session_seen
from kernel import clock


class SessionsSeen:
    """Middleware: a session that is used is noted, once a minute."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.session.session_key and request.user.is_authenticated:
            session_seen(request=request, now=clock.now())
        return self.get_response(request)


@receiver(user_logged_in)
def _logged_in(sender: Any, request: HttpRequest, user: User, **_: Any) -> None:
    session_begin(request=request, user=user, now=clock.now())


@receiver(user_logged_out)
def _logged_out(sender: Any, request: HttpRequest, **_: Any) -> None:
    session_forget(session_key=request.session.session_key)
