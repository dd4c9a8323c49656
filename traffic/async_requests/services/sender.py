"""Sends near-real-time requests through their region's ingress and records the outcomes. `async_requests.planner`
decides the meaning of answers."""

import logging
from collections.abc import Callable, Collection
from datetime import datetime
from functools import partial

from kernel import clock
from kernel.lease_loop import LeaseLoop, in_thread
from kernel.metrics import ASYNC_ATTEMPTS
from traffic.async_requests.planner import AsyncSettings, AsyncState, AttemptResponse, Window
from traffic.async_requests.selectors import ingress_addresses_by_region
from traffic.async_requests.services.requests import (
    LeasedRequest,
    async_attempt_settle,
    async_lease_release,
    async_leases_renew,
    async_requests_claim,
    async_requests_expire,
    async_requests_open,
)
from traffic.routing.planning.tables import IngressAddress
from traffic.routing.services.ingress_client import AcceptedRequest, accepted_request_send

CLAIMED_AT_ONCE = 8

log = logging.getLogger(__name__)


class AsyncSender(LeaseLoop[LeasedRequest]):
    name = "traffic.async_requests"

    def __init__(self, settings: AsyncSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or AsyncSettings()
        super().__init__(self._settings, now)
        self._windows: dict[str, Window] = {}
        self._addresses: dict[str, list[IngressAddress]] = {}

    def is_open(self, now: datetime) -> bool:
        return async_requests_open()

    def claim(self, now: datetime) -> list[LeasedRequest]:
        async_requests_expire(now=now)
        free = min(CLAIMED_AT_ONCE, self._settings.max_sending - len(self.running))
        if free <= 0:
            return []
        self._addresses = ingress_addresses_by_region()
        full = [target for target, window in self._windows.items() if window.is_full]
        return async_requests_claim(count=free, full=full, now=now, settings=self._settings)

    def renew(self, leases: Collection[LeasedRequest], now: datetime) -> set[LeasedRequest]:
        """Cuts off requests that were cancelled or leased by another process, so that their engines stop."""
        return async_leases_renew(leased=leases, now=now, settings=self._settings)

    def release(self, leased: LeasedRequest, now: datetime) -> None:
        async_lease_release(leased=leased, now=now)

    async def work(self, leased: LeasedRequest) -> None:
        window = self._windows.setdefault(leased.target, Window())
        window.sending += 1
        received = AttemptResponse(None, sent=False, reason="the sender was stopped")
        try:
            received = await self._send_attempt(leased)
        finally:
            window.ended(received)
            ASYNC_ATTEMPTS.labels(_outcome_label(received)).inc()
        settle = partial(async_attempt_settle, leased=leased, received=received, settings=self._settings)
        verdict = await in_thread(partial(settle, now=self._now()))
        if verdict is not None and verdict.state is not AsyncState.DONE:
            log.info("async request %s is %s: %s", leased.id, verdict.state, verdict.reason)

    async def _send_attempt(self, leased: LeasedRequest) -> AttemptResponse:
        work = AcceptedRequest(
            id=f"{leased.id}-{leased.attempts}",
            region=leased.region,
            path=leased.path,
            body=leased.body,
            serving_class=leased.serving_class,
            key=leased.key,
            left_s=(leased.deadline_at - self._now()).total_seconds(),
            max_answer_bytes=self._settings.max_answer_bytes,
        )
        return await accepted_request_send(work, self._addresses, leased.attempts)


def _outcome_label(received: AttemptResponse) -> str:
    if received.status is None:
        return "unanswered"
    return "answered" if received.status < 500 and received.status != 429 else "refused"
