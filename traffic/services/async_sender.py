"""The sender of near-real-time requests: leases what is due, sends it through the ingress of its region, keeps the
lease alive meanwhile, and notes the outcome. Any number may run, and any may be killed at any moment. It decides
nothing: what an answer means is in `traffic.planning.async_request`."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from time import monotonic
from typing import TypeVar

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.db import DatabaseError, close_old_connections, connections

from kernel import clock
from kernel.metrics import ASYNC_ATTEMPTS
from traffic.planning.async_request import AsyncSettings, AsyncState, AttemptResponse, Window
from traffic.planning.key import sender_key_text
from traffic.planning.routing import IngressAddress
from traffic.selectors.async_request import ingress_addresses_by_region
from traffic.services.async_lease import (
    LeasedRequest,
    async_attempt_settle,
    async_lease_release,
    async_leases_renew,
    async_requests_claim,
    async_requests_expire,
    async_requests_open,
)
from traffic.services.ingress_client import ingress_post

ANSWER_ROOM_S = 2.0
"""The cell itself ends a request at its deadline, and says so; its answer must have time to arrive."""
CLAIMED_AT_ONCE = 8
DATABASE_PAUSE_S = 2.0
Addresses = dict[str, list[IngressAddress]]
T = TypeVar("T")

log = logging.getLogger(__name__)


class AsyncSender:
    def __init__(self, settings: AsyncSettings | None = None, now: Callable[[], datetime] = clock.now) -> None:
        self._settings = settings or AsyncSettings()
        self._now = now
        self._running: dict[LeasedRequest, asyncio.Task[None]] = {}
        self._windows: dict[str, Window] = {}
        self._addresses: Addresses = {}
        self._renewed_at = 0.0
        self._seen_open_at_s = monotonic()

    async def run(self, stopping: asyncio.Event) -> None:
        """Send until `stopping` is set; then give back what is not finished."""
        while not stopping.is_set():
            try:
                await self.step()
                pause_s = self._settings.pause_s(monotonic() - self._seen_open_at_s)
            except DatabaseError as error:
                log.warning("the database does not answer, going on in %g s: %s", DATABASE_PAUSE_S, error)
                pause_s = DATABASE_PAUSE_S
            try:
                async with asyncio.timeout(pause_s):
                    await stopping.wait()
            except TimeoutError:
                continue
        await self.stop()

    async def step(self) -> int:
        """One pass: expire, renew, lease and begin to send. Returns how many were begun."""
        now = self._now()
        await self._renew(now)
        free = min(CLAIMED_AT_ONCE, self._settings.max_sending - len(self._running))
        claimed = await _in_thread(partial(self._prepare, free, now))
        for leased in claimed:
            window = self._window(leased)
            window.sending += 1
            task = asyncio.get_running_loop().create_task(self._send(leased, window))
            self._running[leased] = task
            task.add_done_callback(partial(self._ended, leased))
        return len(claimed)

    async def idle(self) -> None:
        """Return once nothing is being sent."""
        while self._running:
            await asyncio.wait(self._running.values())

    async def stop(self) -> None:
        """Cut what is being sent, give it back for another sender to take at once, and let go of the database."""
        unfinished = dict(self._running)
        for task in unfinished.values():
            task.cancel()
        await asyncio.gather(*unfinished.values(), return_exceptions=True)
        for leased in unfinished:
            await _in_thread(partial(async_lease_release, leased=leased, now=self._now()))
        await _in_thread(connections.close_all)

    def _prepare(self, free: int, now: datetime) -> list[LeasedRequest]:
        if not async_requests_open():
            return []  # hardly ever anything: nothing else is asked
        self._seen_open_at_s = monotonic()
        async_requests_expire(now=now)
        if free <= 0:
            return []
        self._addresses = ingress_addresses_by_region()
        full = [target for target, window in self._windows.items() if window.is_full]
        return async_requests_claim(count=free, full=full, now=now, settings=self._settings)

    async def _renew(self, now: datetime) -> None:
        """Keep our leases. What was cancelled, or taken from us, is cut off, so that its engine stops."""
        at = asyncio.get_running_loop().time()
        if not self._running or at - self._renewed_at < self._settings.renew_every_s:
            return
        self._renewed_at = at
        leases = list(self._running)
        ours = await _in_thread(partial(async_leases_renew, leased=leases, now=now, settings=self._settings))
        for leased in leases:
            task = self._running.get(leased)
            if leased.id not in ours and task is not None:
                task.cancel()

    async def _send(self, leased: LeasedRequest, window: Window) -> None:
        received = AttemptResponse(None, sent=False, reason="the sender was stopped")
        try:
            received = await self._attempt(leased)
        finally:
            window.ended(received)
            ASYNC_ATTEMPTS.labels(_outcome(received)).inc()
        settle = partial(async_attempt_settle, leased=leased, received=received, settings=self._settings)
        verdict = await _in_thread(partial(settle, now=self._now()))
        if verdict is not None and verdict.state is not AsyncState.DONE:
            log.info("async request %s is %s: %s", leased.id, verdict.state, verdict.reason)

    async def _attempt(self, leased: LeasedRequest) -> AttemptResponse:
        addresses = self._addresses.get(leased.region, [])
        if not addresses:
            return AttemptResponse(None, sent=False, reason=f"region {leased.region} has no ingress")
        left_s = (leased.deadline_at - self._now()).total_seconds()
        headers = {
            "X-Switchyard-Class": leased.serving_class,
            "X-Switchyard-Deadline-Ms": str(max(1, int(left_s * 1000))),
            "X-Request-Id": f"{leased.id}-{leased.attempts}",
        }
        if leased.key:
            headers["Authorization"] = f"Bearer {sender_key_text(leased.key, django_settings.SECRET_KEY)}"
        return await ingress_post(
            addresses[leased.attempts % len(addresses)],
            leased.path,
            leased.body,
            headers,
            limit_s=max(0.0, left_s) + ANSWER_ROOM_S,
            max_bytes=self._settings.max_answer_bytes,
        )

    def _window(self, leased: LeasedRequest) -> Window:
        return self._windows.setdefault(leased.target, Window())

    def _ended(self, leased: LeasedRequest, task: "asyncio.Task[None]") -> None:
        del self._running[leased]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its lease ends by itself, and then it is tried again.
            log.error("async request %s could not be settled", leased.id, exc_info=error)


def _outcome(received: AttemptResponse) -> str:
    if received.status is None:
        return "unanswered"
    return "answered" if received.status < 500 and received.status != 429 else "refused"


async def _in_thread(work: Callable[[], T]) -> T:
    """Run what asks the database in the one thread that has its connection."""

    def fresh() -> T:
        close_old_connections()
        return work()

    return await sync_to_async(fresh, thread_sensitive=True)()
