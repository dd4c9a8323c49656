"""Sends near-real-time requests through their region's ingress and records the outcomes. `async_requests.planner`
decides the meaning of answers."""

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime
from functools import partial
from time import monotonic

from kernel import clock
from kernel.lease_loop import LeaseLoop, in_thread
from kernel.metrics import ASYNC_ATTEMPTS
from traffic.async_requests.planner import AsyncSettings, AsyncState, AttemptResponse, Verdict, Window
from traffic.async_requests.selectors import ingress_addresses_by_region
from traffic.async_requests.services.body_groups import BodyLost, body_read
from traffic.async_requests.services.requests import (
    LeasedRequest,
    async_attempts_settle,
    async_lease_release,
    async_leases_renew,
    async_requests_claim,
    async_requests_expire,
    async_requests_open,
)
from traffic.files.services.store_protocol import StoreAway
from traffic.routing.planning.tables import IngressAddress
from traffic.routing.services.ingress_client import AcceptedRequest, accepted_request_send

ADDRESSES_FOR_S = 0.5
"""Interval at which changed ingresses are found."""
FULL_S = 1.0
"""Interval at which other targets are searched while no known one has room: it reads the whole queue."""
Unsettled = tuple[LeasedRequest, AttemptResponse, "asyncio.Future[Verdict | None]"]

log = logging.getLogger(__name__)


class AsyncSender(LeaseLoop[LeasedRequest]):
    """Outcomes that arrive within `settle_pause_s`, or while others are being recorded, are recorded together. It waits
    no longer once it has `settle_at_once` of them."""

    name = "traffic.async_requests"

    def __init__(self, settings: AsyncSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or AsyncSettings()
        super().__init__(self._settings, now)
        self._windows: dict[str, Window] = {}
        self._addresses: dict[str, list[IngressAddress]] = {}
        self._addresses_at_s = float("-inf")
        self._claims_again_at = -1
        self._claimed_at_s = self._expired_at_s = float("-inf")
        self._unsettled: list[Unsettled] = []
        self._settling: asyncio.Task[None] | None = None
        self._has_group = asyncio.Event()

    def is_open(self, now: datetime) -> bool:
        return bool(self.running) or async_requests_open()

    def claim(self, now: datetime) -> list[LeasedRequest]:
        if monotonic() - self._expired_at_s >= self._settings.poll_s:
            self._expired_at_s = monotonic()
            async_requests_expire(now=now)
        free = self._settings.max_sending - len(self.running)
        if free <= 0:
            return []
        if monotonic() - self._addresses_at_s >= ADDRESSES_FOR_S:
            self._addresses, self._addresses_at_s = ingress_addresses_by_region(), monotonic()
        rooms = {target: window.room for target, window in self._windows.items()}
        if self.running and not any(rooms.values()) and monotonic() - self._claimed_at_s < FULL_S:
            return []
        self._claimed_at_s = monotonic()
        claimed = async_requests_claim(count=free, rooms=rooms, now=now, settings=self._settings)
        self._claims_again_at = (len(self.running) + len(claimed)) // 2 if claimed else -1
        return claimed

    def wants_pass(self) -> bool:
        """Whether more may wait, and half of the requests in flight have ended."""
        return len(self.running) <= self._claims_again_at

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
        verdict = await self._settle(leased, received)
        if verdict is not None and verdict.state is not AsyncState.DONE:
            log.info("async request %s is %s: %s", leased.id, verdict.state, verdict.reason)

    async def _settle(self, leased: LeasedRequest, received: AttemptResponse) -> Verdict | None:
        settled: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        self._unsettled.append((leased, received, settled))
        if len(self._unsettled) >= self._settings.settle_at_once:
            self._has_group.set()
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle_all())
        return await settled

    async def _settle_all(self) -> None:
        try:
            await self._pause_for_group()
            while waiting := [each for each in self._unsettled if not each[2].cancelled()]:
                self._unsettled.clear()
                self._has_group.clear()
                await self._settle_group(waiting)
                await self._pause_for_group()
        finally:
            self._settling = None

    async def _pause_for_group(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.settle_pause_s):
                await self._has_group.wait()

    async def _settle_group(self, group: list[Unsettled]) -> None:
        attempts = [(leased, received) for leased, received, _ in group]
        settle = partial(async_attempts_settle, attempts=attempts, settings=self._settings)
        try:
            verdicts = await in_thread(partial(settle, now=self._now()))
        except Exception as error:
            for _, _, settled in group:
                if not settled.done():
                    settled.set_exception(error)
            return
        for (_, _, settled), verdict in zip(group, verdicts, strict=True):
            if not settled.done():
                settled.set_result(verdict)

    async def _send_attempt(self, leased: LeasedRequest) -> AttemptResponse:
        try:
            body = await asyncio.to_thread(body_read, b"", leased.body_at) if leased.body_at else leased.body
        except (StoreAway, BodyLost) as error:
            return AttemptResponse(None, sent=False, reason=f"its body cannot be read: {error}")
        work = AcceptedRequest(
            id=f"{leased.id}-{leased.attempts}",
            region=leased.region,
            path=leased.path,
            body=body,
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
