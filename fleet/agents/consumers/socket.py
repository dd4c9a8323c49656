"""`/agents/ws`: the raw ASGI end of every agent's WebSocket. Authenticates, limits and decodes messages, and passes
them to the hub. Raw, because a Channels consumer triples the cost of a report and uses one shared thread."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from math import ceil
from typing import Any

from django.db import DatabaseError

from engine_agent.protocol.codec import BadMessage, decode_up, frames_of
from engine_agent.protocol.identity import CERTIFICATE_WANTED
from engine_agent.protocol.machine_messages import VERSION_MOST
from engine_agent.protocol.messages import PROTOCOL_VERSION, PROTOCOLS_SPOKEN, DownMessage, Hello, Refused
from fleet.agents.consumers.hub import AgentHub, AgentSession
from fleet.agents.consumers.limits import (
    RETRY_AFTER_S,
    CredentialVerdict,
    HelloSlot,
    RetryLater,
    TokenBucket,
    credential_of,
)
from fleet.agents.services.enrolment import PEER_CERTIFICATE, AgentIdentity, certificate_is_of, certificate_missing
from kernel.refusals import Conflict

HELLO_TIMEOUT_S = 10.0
REFUSAL_LIMIT_S = 1.0
FRAMES_PER_S = 20.0
FRAMES_BURST = 100.0
BYTES_PER_S = 256.0 * 1024
BYTES_BURST = 4.0 * 1024 * 1024
"""A report has a few KiB every 2 s; while a user follows logs, three logs add up to a frame a second."""
CLOSE_REFUSED = 4403
EXPECT_MESSAGE = "switchyard.expect_message"
"""In the scope: a function that names one message and takes it from the connection, before the application."""
PROTOCOL_MOST = 9999
"""Characters of an agent's hello that a refusal repeats."""

Message = dict[str, Any]
Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger(__name__)


class _Closed(Exception):
    pass


class OtherProtocol(Exception):
    """An agent speaks an unsupported protocol; the text names it and the fix."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        spoken = " and ".join(map(str, PROTOCOLS_SPOKEN))
        remedy = (
            "upgrade the control plane first"
            if hello.protocol > PROTOCOL_VERSION
            else "remove this host and join it again, or have its provider restart the agent"
        )
        version = "".join(char for char in hello.agent_version[:VERSION_MOST] if char.isprintable())
        protocol = min(max(hello.protocol, 0), PROTOCOL_MOST)
        what = f"{hello.kind} {hello.id}, version {version}, speaks protocol {protocol}"
        super().__init__(f"{what}, and this control plane {spoken}: {remedy}")


class AgentSocket:
    def __init__(self, hub: AgentHub) -> None:
        self.hub = hub

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.hub.start()
        await receive()  # websocket.connect
        header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        match self.hub.credential_filter.check(header):
            case CredentialVerdict.REFUSED:
                await send({"type": "websocket.close", "code": CLOSE_REFUSED})  # before accept: answers 403
                return
            case CredentialVerdict.LATER:
                await _respond(send, 429, b"too many credentials are being looked up", _retry_after(RETRY_AFTER_S))
                return
        credential = credential_of(header)
        hello_slot = self.hub.hello_queue.begin(credential)
        if isinstance(hello_slot, RetryLater):
            await _respond(send, 503, b"too many agents connect", _retry_after(hello_slot.after_s))
            return
        try:
            await self._authenticate(receive, send, credential, hello_slot, scope)
        finally:
            hello_slot.end()

    async def _authenticate(
        self, receive: Receive, send: Send, credential: str, hello_slot: HelloSlot, scope: dict[str, Any]
    ) -> None:
        certificate = scope.get(PEER_CERTIFICATE)
        try:
            identity = await self.hub.identify(credential)
            if identity is None or (certificate and not certificate_is_of(certificate, identity)):
                await send({"type": "websocket.close", "code": CLOSE_REFUSED})
                return
            if certificate:
                await self.hub.bind(identity)
        except DatabaseError as error:
            log.warning("cannot authenticate an agent: %s", error)
            # Not a refusal: the credential may be valid.
            await _respond(send, 503, b"the database does not answer", _retry_after(1))
            return
        if not certificate and (refusal := certificate_missing(identity)):
            log.warning("refused an agent: %s", refusal)
            await self.hub.note_refused(identity, refusal)
            await _respond(send, 403, refusal.encode(), [(CERTIFICATE_WANTED.encode(), b"1")])
            return
        await send({"type": "websocket.accept"})
        try:
            hello = await self._hello(receive, identity)
            whole = partial(_send_whole, asyncio.Lock(), send)
            session = AgentSession(identity, hello, whole, partial(_close, send), is_certified=bool(certificate))
            if (expect := scope.get(EXPECT_MESSAGE)) is not None:
                session.expect_heartbeat = partial(expect, take=partial(self.hub.take_heartbeat, session))
            await self._run_session(receive, session, hello_slot)
        except _Closed:
            pass
        except (BadMessage, Conflict) as refusal:
            await _refuse(send, str(refusal))
        except OtherProtocol as refusal:
            await _refuse(send, str(refusal), retry=False)
            await self.hub.note_refused(identity, str(refusal))
        except DatabaseError as error:
            await _refuse(send, f"the database does not answer: {error}")

    async def _run_session(self, receive: Receive, session: AgentSession, hello_slot: HelloSlot) -> None:
        try:
            await self.hub.connect(session)
            hello_slot.end()
            await self._receive_messages(receive, session)
        finally:
            self.hub.disconnect(session)

    async def _hello(self, receive: Receive, identity: AgentIdentity) -> Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = decode_up(await _frame(receive))
        except TimeoutError as error:
            raise BadMessage(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from error
        if not isinstance(message, Hello):
            raise BadMessage(f"the first message must be a hello, not {type(message).__name__}")
        if (message.kind, message.id) != (identity.kind, identity.id):
            raise BadMessage(f"the credential is for {identity.kind} {identity.id}, not {message.kind} {message.id}")
        if message.protocol not in PROTOCOLS_SPOKEN:
            raise OtherProtocol(message)
        return message

    async def _receive_messages(self, receive: Receive, session: AgentSession) -> None:
        clock = asyncio.get_running_loop().time
        frames = TokenBucket(per_s=FRAMES_PER_S, burst=FRAMES_BURST, now=clock())
        volume = TokenBucket(per_s=BYTES_PER_S, burst=BYTES_BURST, now=clock())
        while True:
            frame = await _frame(receive)
            if session.is_cut:
                raise _Closed
            if not frames.take(clock()):
                raise BadMessage(f"more than {FRAMES_PER_S:.0f} messages a second")
            if not volume.take(clock(), len(frame)):
                raise BadMessage(f"more than {BYTES_PER_S / 1024:.0f} KiB a second")
            message = decode_up(frame)
            if isinstance(message, Hello):
                raise BadMessage("a second hello on one connection")
            self.hub.receive(session, message)


async def _frame(receive: Receive) -> bytes | str:
    event = await receive()
    if event["type"] == "websocket.disconnect":
        raise _Closed
    frame: bytes | str = event.get("bytes") or event.get("text") or b""
    return frame


async def _refuse(send: Send, reason: str, *, retry: bool = True) -> None:
    log.warning("refused an agent: %s", reason)
    try:
        async with asyncio.timeout(REFUSAL_LIMIT_S):
            await _send(send, Refused(reason=reason, retry=retry))
            await _close(send, reason)
    except Exception as error:
        log.debug("could not send the refusal: %s", error)


async def _send(send: Send, message: DownMessage) -> None:
    for frame in frames_of(message):
        await send({"type": "websocket.send", "text": frame.decode()})


async def _send_whole(turn: asyncio.Lock, send: Send, message: DownMessage) -> None:
    """One message at a time: the frames of two messages must not mix."""
    async with turn:
        await _send(send, message)


async def _close(send: Send, reason: str) -> None:
    await send({"type": "websocket.close", "code": CLOSE_REFUSED, "reason": reason[:100]})


def _retry_after(seconds: float) -> Headers:
    return [(b"retry-after", str(ceil(seconds)).encode())]


async def _respond(send: Send, status: int, why: bytes, headers: Headers) -> None:
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": why})
