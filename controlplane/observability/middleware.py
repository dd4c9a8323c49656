"""What every request carries and leaves: its number (`X-Request-Id`, in and out), its span, its count and time, and a
line in the log for what changed something or failed. The first middleware; it decides nothing."""

import logging
from collections.abc import Callable
from time import perf_counter

from django.http import HttpRequest, HttpResponse

from kernel.metrics import HTTP_REQUESTS, HTTP_SECONDS
from kernel.tracing import HEADER, bind_request_id, span

SURFACES = {"api": "api", "agents": "agents", "v1": "applications", "static": "static", "metrics": "metrics"}
"""First part of a path -> what it belongs to; every other path is a page."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET = frozenset({"GET", "HEAD", "OPTIONS"})

log = logging.getLogger(__name__)


class RequestMetricsMiddleware:
    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        began = perf_counter()
        method = request.method if request.method in METHODS else "OTHER"
        with (
            bind_request_id(request.headers.get(HEADER, "")) as number,
            span(
                f"{method} {request.path}", parent=request.headers.get("traceparent", ""), may_begin_trace=True
            ) as attributes,
        ):
            response = self.get_response(request)
            response.headers.setdefault(HEADER, number)
            route = request.resolver_match.route if request.resolver_match else ""
            attributes |= {"name": f"{method} {route or request.path}", "switchyard.request_id": number}
            attributes["http.response.status_code"] = response.status_code
            attributes["failed"] = response.status_code >= 500
            took_s = perf_counter() - began
            count_request(request.path, str(method), response.status_code, took_s)
            if method not in QUIET or response.status_code >= 500:
                log.info("%s %s %d in %.0f ms", method, request.path, response.status_code, 1000 * took_s)
        return response


def count_request(path: str, method: str, status: int, took_s: float) -> None:
    """Count one that was answered, by the part of the control plane that its path belongs to."""
    surface = SURFACES.get(path.strip("/").partition("/")[0], "pages")
    HTTP_REQUESTS.labels(surface, method, str(status)).inc()
    HTTP_SECONDS.labels(surface).observe(took_s)
