"""Notes which sessions are used. Decides nothing."""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from accounts.services.session import session_seen
from kernel import clock


class SessionTrackingMiddleware:
    """A session that is used is noted, once a minute."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.session.session_key and request.user.is_authenticated:
            session_seen(request=request, now=clock.now())
        return self.get_response(request)
