"""Requests per caller and minute, counted in Valkey, shown in `RateLimit-*` headers, refused with 429 above the limit.

Without Valkey no request is counted or refused: the limit protects against accidents, not attacks."""

import functools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis
from django.conf import settings
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from kernel.addresses import client_network
from kernel.circuit_breaker import CircuitBreaker

if TYPE_CHECKING:  # it loads this module by its name in the settings
    from rest_framework.views import APIView

WINDOW_S = 60
REPLY_LIMIT_S = 0.2
"""A reachable server needs well below a millisecond."""
COUNTS = CircuitBreaker(pause_s=2.0)
WATCH_RETRY = "switchyard.watch_retry"
"""In the ASGI scope of a repeated watch, which was counted at its start (controlplane.api.watch_middleware)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RateStatus:
    """A caller's count in this minute. `limit` requests per window; `reset_s` until the next window."""

    limit: int
    count: int
    reset_s: int

    @property
    def headers(self) -> dict[str, str]:
        return {
            "RateLimit-Limit": str(self.limit),
            "RateLimit-Remaining": str(max(0, self.limit - self.count)),
            "RateLimit-Reset": str(self.reset_s),
            "RateLimit-Policy": f"{self.limit};w={WINDOW_S}",
        }


def count_request(kind: str, caller: str, limit: int) -> RateStatus | None:
    """Count one request. Returns None without a limit or without Valkey."""
    if limit <= 0 or COUNTS.is_open:
        return None
    window, passed_s = divmod(time.time(), WINDOW_S)
    name = f"switchyard:api-rate:{kind}:{caller}:{int(window)}"
    try:
        pipeline = _server().pipeline(transaction=False)
        pipeline.incr(name)
        pipeline.expire(name, 2 * WINDOW_S)
        count = int(pipeline.execute()[0])
    except (redis.RedisError, OSError) as error:
        COUNTS.trip()
        log.warning("requests are not counted for %.0f s: %s", COUNTS.pause_s, error)
        return None
    return RateStatus(limit, count, max(1, round(WINDOW_S - passed_s)))


@functools.cache
def _server() -> Any:
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=REPLY_LIMIT_S, socket_connect_timeout=REPLY_LIMIT_S, retry=None
    )


class CallerRateThrottle(BaseThrottle):
    """DRF's hook: counts reads and writes of a known caller separately, and anonymous requests by address."""

    _status: RateStatus | None = None

    def allow_request(self, request: Request, view: "APIView") -> bool:
        if getattr(request._request, "scope", {}).get(WATCH_RETRY):
            return True
        kind, caller, limit = _bucket(request)
        self._status = request._request.rate_status = count_request(kind, caller, limit)  # type: ignore[attr-defined]
        return self._status is None or self._status.count <= self._status.limit

    def wait(self) -> float | None:
        return float(self._status.reset_s) if self._status else None


def _bucket(request: Request) -> tuple[str, str, int]:
    user = getattr(request, "_user", None)  # `request.user` would authenticate once more, and fail again
    if user is None or not user.is_authenticated:
        network = client_network(str(request.META.get("REMOTE_ADDR", "")))
        return "anonymous", network, settings.API_ANONYMOUS_REQUESTS_PER_MIN
    if request.method in SAFE_METHODS:
        return "read", str(user.pk), settings.API_READS_PER_MIN
    return "write", str(user.pk), settings.API_WRITES_PER_MIN


def rate_headers(request: Request) -> dict[str, str]:
    status: RateStatus | None = getattr(request._request, "rate_status", None)
    return status.headers if status else {}
