"""Keeps an agent's certificate fresh over its connection: requests the first, renews it after half of its life, and
sooner when other authorities count. Takes over whom to believe whenever the control plane says it.

It never ends a connection, and an agent whose certificate cannot be renewed goes on with the one that it has.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from engine_agent.node.identity import Identity
from engine_agent.protocol.messages import Certificate, CertificateRequest, Trust

if TYPE_CHECKING:
    from engine_agent.node.certificates import Validity

REQUEST_AGAIN_S = 30.0
"""Without an answer. The control plane signs one each `fleet.consumers.certificates.REQUESTS_PER_S`."""
REQUEST_AGAIN_MOST_S = 600.0
"""After several requests that brought nothing that counts: none was signed, or this host's clock is wrong."""
LOOK_AT_LEAST_EVERY_S = 60.0
"""The clock of a host may be set."""
SPREAD_S = 5.0
"""Of requests after everybody heard of other authorities."""

log = logging.getLogger(__name__)


def request_again_s(in_vain: int) -> float:
    """How long after a request another follows; `in_vain` brought nothing that counts. At most twice this long, by
    chance."""
    return float(min(REQUEST_AGAIN_S * 2 ** min(max(in_vain - 1, 0), 10), REQUEST_AGAIN_MOST_S))


class CertificateRenewal:
    """Of one agent. `draw` is uniform in [0, 1)."""

    def __init__(self, identity: Identity, draw: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._identity = identity
        self._draw = draw
        self._on_change = on_change
        self._look = asyncio.Event()
        self._share = draw()
        self._bundle_changed = False
        self._in_vain = 0
        self._clock_said = False

    async def run(self, send: Callable[[CertificateRequest], Awaitable[None]]) -> None:
        """Request what is due over one connection, until cancelled."""
        clock, asked_at_s, draw = asyncio.get_running_loop().time, -REQUEST_AGAIN_MOST_S * 2, 0.0
        while True:
            again_at_s = asked_at_s + request_again_s(self._in_vain) * (1 + draw)
            wait_s = max(self._due_in_s(datetime.now(UTC)), again_at_s - clock())
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
                self._in_vain += 1
                await send(CertificateRequest(request, self._identity.bundle_digest()))
            asked_at_s, draw = clock(), self._draw()

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
            self._judge(validity, datetime.now(UTC))
            return
        self._identity.store_trust(bundle=trust.bundle, revoked=trust.revoked)
        if self._identity.bundle_digest() != believed:
            self._bundle_changed, self._in_vain = True, 0

    def _judge(self, validity: "Validity", now: datetime) -> None:
        """Whether a new certificate counts by this host's clock; that it does not is said once."""
        if validity.not_before <= now < validity.not_after:
            self._in_vain, self._clock_said = 0, False
        elif not self._clock_said:
            self._clock_said = True
            moments = (now, validity.not_before, validity.not_after)
            log.error(
                "this host's clock says %s, and the new certificate counts from %s to %s: set the clock",
                *(moment.strftime("%Y-%m-%d %H:%M:%S UTC") for moment in moments),
            )

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
