"""Sends certificates, new credentials and trusted authorities to agents over their sockets. Requests are limited for
each agent and signed in batches; the hub runs the database calls in a thread."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from django.conf import settings

from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.messages import Certificate, CertificateRequest, Credential, DownMessage
from engine_agent.protocol.messages import Trust as TrustMessage
from fleet.agents.consumers.limits import Batches, TokenBucket
from fleet.agents.selectors import Trust, trust_now
from fleet.agents.services.authority import CertificateOrder
from fleet.agents.services.enrolment import AgentCertificate, AgentIdentity, AgentOrder, agent_certificates_issue
from kernel import clock

REQUESTS_PER_S, REQUESTS_BURST = 1 / 15.0, 4.0
"""Of one agent. A healthy agent sends one in half a day, or retries after 30 s."""

log = logging.getLogger(__name__)


class TrustedSession(Protocol):
    identity: AgentIdentity
    is_certified: bool
    trust_version: str
    requests: "TokenBucket | None"
    is_cut: bool


class CertificateExchange:
    """Of one web process. `in_database` runs a blocking call; `send` sends within a time-out, or cuts the session."""

    def __init__(
        self,
        in_database: Callable[..., Awaitable[Any]],
        send: Callable[[Any, DownMessage, str], Coroutine[Any, Any, bool]],
    ) -> None:
        self._in_database = in_database
        self._send = send
        self._orders: Batches[AgentOrder, AgentCertificate] = Batches(self._sign)
        self._tasks: set[asyncio.Task[object]] = set()

    def request(self, session: TrustedSession, message: CertificateRequest) -> None:
        """Has a request signed and answers it. Requests beyond the agent's budget are dropped."""
        now_s = asyncio.get_running_loop().time()
        if session.requests is None:
            session.requests = TokenBucket(per_s=REQUESTS_PER_S, burst=REQUESTS_BURST, now=now_s)
        if session.requests.take(now_s):
            self._start(self._answer(session, message))
        else:
            log.warning("%s requests certificates too often", session.identity.id)

    async def tell(self, sessions: Iterable[TrustedSession]) -> None:
        """Sends the trusted authorities to sessions that were last sent others."""
        trust: Trust | None = await self._in_database(trust_now)
        if trust is None:
            return
        version = trust.version
        for session in sessions:
            if session.trust_version != version:
                session.trust_version = version
                self._start(self._send(session, _trust_message(trust), "the trusted authorities"))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _answer(self, session: TrustedSession, message: CertificateRequest) -> None:
        identity = session.identity
        order = CertificateOrder(
            IdentityKind(identity.kind.value), identity.id, message.request, believed=message.believed
        )
        try:
            signed = await self._orders.ask(AgentOrder(order, identity.prefix, session.is_certified))
        except Exception as error:
            log.error("no certificate for %s: %s", identity.id, error)
            return
        trust = signed.certificate.trust
        session.trust_version = trust.version
        await self._send(session, Certificate(signed.certificate.chain, _trust_message(trust)), "its certificate")
        if signed.credential is not None:
            await self._send(session, Credential(signed.credential), "its new credential")

    async def _sign(self, orders: Sequence[AgentOrder]) -> list[AgentCertificate | Exception]:
        issue = partial(agent_certificates_issue, now=clock.now())
        found: list[AgentCertificate | Exception] = await self._in_database(issue, orders)
        return found

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _trust_message(trust: Trust) -> TrustMessage:
    return TrustMessage(bundle=trust.bundle, revoked=trust.revoked, servers=tuple(settings.AGENT_URLS))
