"""Keeps an agent's certificate fresh over its connection: requests the first, renews it after half of its life, and
sooner when other authorities count. Takes over whom to believe whenever the control plane says it.

It never ends a connection, and an agent whose certificate cannot be renewed goes on with the one that it has.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from engine_agent.protocol.messages import Certificate, CertificateRequest, Trust
from engine_agent.runtime.identity import Identity

REQUEST_AGAIN_S = 30.0
"""Without an answer. The control plane signs one each `fleet.consumers.certificates.REQUESTS_PER_S`."""
LOOK_AT_LEAST_EVERY_S = 60.0
"""The clock of a host may be set."""
SPREAD_S = 5.0
"""Of requests after everybody heard of other authorities."""

log = logging.getLogger(__name__)


class CertificateRenewal:
    """Of one agent. `draw` is uniform in [0, 1)."""

    def __init__(self, identity: Identity, draw: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._identity = identity
        self._draw = draw
        self._on_change = on_change
        self._look = asyncio.Event()
        self._share = draw()
        self._bundle_changed = False

    async def run(self, send: Callable[[CertificateRequest], Awaitable[None]]) -> None:
        """Request what is due over one connection, until cancelled."""
        clock, not_before_s = asyncio.get_running_loop().time, 0.0
        while True:
            wait_s = max(self._due_in_s(datetime.now(UTC)), not_before_s - clock())
            if wait_s > 0:
                await self._pause(min(wait_s, LOOK_AT_LEAST_EVERY_S))
                continue
            if self._bundle_changed:
                await asyncio.sleep(SPREAD_S * self._draw())
            try:
                request = await asyncio.to_thread(self._identity.signing_request)
            except OSError as error:
                log.error("no certificate is requested: %s", error)
            else:
                await send(CertificateRequest(request, self._identity.bundle_digest()))
            not_before_s = clock() + REQUEST_AGAIN_S * (1 + self._draw())

    async def take(self, message: Certificate | Trust) -> None:
        """Keep what the control plane said."""
        before = self._identity.stamp()
        try:
            await asyncio.to_thread(self._store, message)
        except (OSError, ValueError) as error:
            log.error("not taken over: %s", error)
        if self._identity.stamp() != before:
            self._on_change()
        self._look.set()

    def _store(self, message: Certificate | Trust) -> None:
        trust = message if isinstance(message, Trust) else message.trust
        believed = self._identity.bundle_digest()
        if isinstance(message, Certificate):
            validity = self._identity.store(chain=message.chain, bundle=trust.bundle, revoked=trust.revoked)
            self._bundle_changed, self._share = False, self._draw()
            log.info("%s has a certificate until %s", validity.name, validity.not_after.isoformat())
            if not validity.not_before <= (now := datetime.now(UTC)) < validity.not_after:
                log.error(
                    "this host's clock says %s, and the new certificate counts from %s to %s: set the clock",
                    *(
                        moment.strftime("%Y-%m-%d %H:%M:%S UTC")
                        for moment in (now, validity.not_before, validity.not_after)
                    ),
                )
            return
        self._identity.store_trust(bundle=trust.bundle, revoked=trust.revoked)
        self._bundle_changed = self._bundle_changed or self._identity.bundle_digest() != believed

    def _due_in_s(self, now: datetime) -> float:
        validity = self._identity.validity()
        if validity is None or self._bundle_changed or not validity.not_before <= now < validity.not_after:
            return 0.0
        return (validity.renew_after(self._share) - now).total_seconds()

    async def _pause(self, seconds: float) -> None:
        """Until then, or until something was taken over."""
        self._look.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._look.wait()
        except TimeoutError:
            return
