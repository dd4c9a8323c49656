"""Checks passwords before the transaction of the request, records the use of sessions, and redirects users who must add
a second factor."""

import math
from collections.abc import Callable
from typing import Any

from django.contrib.auth import logout
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from accounts.permissions import must_enrol
from accounts.services.login import Attempt, LoginLimited, login_name, password_login
from accounts.services.session import session_is_over, session_seen
from accounts.views import Login, device_of
from kernel import clock
from kernel.refusals import Busy


class PasswordLoginMiddleware:
    """Checks a password that is sent to the login, or refuses it before the view runs. It comes after the CSRF check
    and before all middleware that queries the database."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_view(self, request: HttpRequest, view: Any, args: Any, kwargs: Any) -> HttpResponse | None:
        """Stores the user on the request, for the view."""
        if request.method != "POST" or getattr(view, "view_class", None) is not Login:
            return None
        name = login_name(request.POST.get("username", ""))
        address = str(request.META.get("REMOTE_ADDR") or "")
        attempt = Attempt(username=name, address=address, device=device_of(request, name))
        password = request.POST.get("password", "")
        try:
            user = password_login(request=request, attempt=attempt, password=password, now=clock.now())
        except Busy as busy:
            return _try_again(request, 503, busy.retry_after_s)
        except LoginLimited as limited:
            return _try_again(request, 429, limited.wait_s)
        request.password_user = user  # type: ignore[attr-defined]  # read by the view's form
        return None


def _try_again(request: HttpRequest, status: int, wait_s: float) -> HttpResponse:
    wait = math.ceil(wait_s)
    context = {"busy": status == 503, "wait_s": wait, "wait_min": math.ceil(wait / 60)}
    response = render(request, "accounts/limited.html", context, status=status)
    response.headers["Retry-After"] = str(wait)
    return response


class SessionTrackingMiddleware:
    """Records the use of a session, once a minute. Ends an expired session and makes its user anonymous."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.session.session_key and request.user.is_authenticated:
            now = clock.now()
            if session_is_over(request=request, now=now):
                logout(request)
            else:
                session_seen(request=request, now=now)
        return self.get_response(request)


class SecondFactorEnrolmentMiddleware:
    """Users who must have a second factor and have none have to add one first. Requests with tokens are exempt."""

    OPEN = frozenset(
        {"factors", "factor-app", "factor-key", "factor-confirm", "login", "login-second", "logout", "healthz"}
    )

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_view(self, request: HttpRequest, view: Any, args: Any, kwargs: Any) -> HttpResponse | None:
        match = request.resolver_match
        if match is None or match.url_name in self.OPEN or not must_enrol(request):
            return None
        if request.path.startswith("/api/") or request.headers.get("HX-Request"):
            raise PermissionDenied("Add a second factor first: open the settings in a browser.")
        return redirect("factors")
