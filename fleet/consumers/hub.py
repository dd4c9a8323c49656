"""The agents that are connected to this process: who they are, what they said last, and what they were told.

Reports are coalesced here and written once a second, at once when something changed. What agents should be told is
looked up when a doorbell rings, and anyway every second. One thread talks to PostgreSQL; the event loop never does.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeVar

from channels.layers import get_channel_layer
from django.db import close_old_connections, connections

from engine_agent.protocol.codec import BadMessage
from engine_agent.protocol.messages import DownMessage, Hello, UpMessage
from engine_agent.protocol.states import AgentKind
from fleet.consumers.causes import Causes
from fleet.selectors.snapshot import LISTENING_LEASE
from fleet.services.enrolment import AgentIdentity, credentials_revoked
from kernel import clock
from kernel.leases import lease_take
from kernel.live import AGENT_SOCKETS
from kernel.metrics import AGENTS_CONNECTED

FLUSH_EVERY_S = 1.0
URGENT_PAUSE_S = 0.05
"""Collects what changes together (the ranks of one cell) into one write."""
REVOKED_EVERY_S = 5.0
SEND_LIMIT_S = 10.0
"""An agent that takes no message for so long is not there, whatever its socket says."""
CLOSE_LIMIT_S = 1.0
LISTENING_TTL_S = 5.0

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentConnection:
    """One open socket. `told` is what it was last sent, in whatever form its desk compares.

    `telling` is the sending under way, if any. After `is_cut` nothing counts any more that the agent says.
    """

    identity: AgentIdentity
    hello: Hello
    send: Callable[[DownMessage], Awaitable[None]]
    close: Callable[[str], Awaitable[None]]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: datetime = field(default_factory=clock.now)
    told: int = -1
    telling: "asyncio.Task[None] | None" = None
    is_cut: bool = False


class Desk(Protocol):
    """What one kind of agent needs: how its reports are kept, and what it should be told. `Desk` methods that are not
    coroutines run in the database thread, except `heard`, which only notes."""

    def introduced(self, connection: AgentConnection) -> None:
        """A new connection said hello."""

    def heard(self, connection: AgentConnection, message: UpMessage) -> bool:
        """Note what an agent said, on the event loop. True: it is news, write it soon."""

    def left(self, connection: AgentConnection) -> None:
        """Note that a connection ended, on the event loop."""

    def flush(self) -> None:
        """Write what was noted."""

    def to_tell(self, connections: Sequence[AgentConnection]) -> dict[str, tuple[int, DownMessage]]:
        """Agent id -> the newer version and its message, for each that was last told another one."""


class AgentHub:
    """All agents of this process, and the loops that serve them. Started by the first connection."""

    def __init__(self, desks: dict[AgentKind, Desk]) -> None:
        self.desks = desks
        self.connections: dict[str, AgentConnection] = {}
        self.causes = Causes()
        self._database = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agent-hub-db")
        self._urgent = asyncio.Event()
        self._bell = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []

    async def in_database(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call in the thread that owns this process's agent connection to PostgreSQL."""

        def guarded() -> T:
            close_old_connections()
            try:
                return call(*arguments)
            finally:
                close_old_connections()

        return await asyncio.get_running_loop().run_in_executor(self._database, guarded)

    def start(self) -> None:
        """Start the loops; a second call does nothing."""
        if not self._loops:
            loops = (self._listen_lease, self._flush_loop, self._tell_loop, self._doorbell, self._revocations)
            self._loops = [asyncio.create_task(self._for_ever(loop)) for loop in loops]

    async def stop(self) -> None:
        """End the loops and the database thread. The process's end does the same; tests call it."""
        ending, self._loops = set(self._loops), []
        while ending:  # a library underneath may swallow one cancellation
            for task in ending:
                task.cancel()
            _, ending = await asyncio.wait(ending, timeout=0.2)
        await self.in_database(connections.close_all)
        self._database.shutdown()

    async def join(self, connection: AgentConnection) -> None:
        """Take in an agent; an older connection of the same agent gives way."""
        await self.in_database(self.desks[connection.identity.kind].introduced, connection)
        older = self.connections.get(connection.identity.id)
        self.connections[connection.identity.id] = connection
        if older is not None:
            await self._cut(older, "a newer connection of this agent took its place")
        self._urgent.set()
        self._bell.set()

    def heard(self, connection: AgentConnection, message: UpMessage) -> None:
        if not connection.is_cut and self.desks[connection.identity.kind].heard(connection, message):
            self._urgent.set()

    def leave(self, connection: AgentConnection) -> None:
        """Its socket has ended, or counts as ended. A second call does nothing."""
        if self.connections.get(connection.identity.id) is connection:
            del self.connections[connection.identity.id]
        if connection.telling is not None:
            connection.telling.cancel()
        self.desks[connection.identity.kind].left(connection)
        self._urgent.set()

    async def _cut(self, connection: AgentConnection, reason: str) -> None:
        """End a connection from our side. An agent that does not even take the goodbye is not waited for."""
        connection.is_cut = True
        self.leave(connection)
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await connection.close(reason)
        except Exception as error:
            log.debug("closing %s: %s", connection.identity.id, error)

    # --- loops ------------------------------------------------------------------------------------------------------

    async def _for_ever(self, step: Callable[[], Awaitable[None]]) -> None:
        """A database or a bell that is away for a while must not end a loop."""
        while True:
            try:
                await step()
            except Exception as error:
                log.warning("%s: %s: %s", step.__name__.strip("_"), type(error).__name__, error)
                await asyncio.sleep(1.0)

    async def _listen_lease(self) -> None:
        await self.in_database(self._renew_listening)
        await asyncio.sleep(1.0)

    @staticmethod
    def _renew_listening() -> None:
        # One holder for all web processes: agents are heard as long as one of them listens.
        lease_take(name=LISTENING_LEASE, holder="web", ttl_s=LISTENING_TTL_S, now=clock.now())

    async def _flush_loop(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_EVERY_S):
                await self._urgent.wait()
            await asyncio.sleep(URGENT_PAUSE_S)
        except TimeoutError:
            pass
        self._urgent.clear()
        for kind in self.desks:
            AGENTS_CONNECTED.labels(kind.value).set(sum(c.identity.kind is kind for c in self.connections.values()))
        flushes = (self.in_database(desk.flush) for desk in self.desks.values())
        failed = [error for error in await asyncio.gather(*flushes, return_exceptions=True) if error is not None]
        if failed:  # after all had their turn: what one desk cannot write keeps no other from writing
            raise failed[0]

    async def _tell_loop(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_EVERY_S):
                await self._bell.wait()
        except TimeoutError:
            pass
        self._bell.clear()
        for kind, desk in self.desks.items():
            listening = [c for c in self.connections.values() if c.identity.kind is kind and c.telling is None]
            if listening:
                news = await self.in_database(desk.to_tell, listening)
                for connection in listening:
                    if connection.identity.id in news:
                        version, message = news[connection.identity.id]
                        telling = self._tell(connection, version, self.causes.told(connection.identity.id, message))
                        connection.telling = asyncio.create_task(telling)

    async def _tell(self, connection: AgentConnection, version: int, message: DownMessage) -> None:
        """Runs as a task of its own, so that an agent that takes nothing keeps no other waiting."""
        try:
            async with asyncio.timeout(SEND_LIMIT_S):
                await connection.send(message)
        except BadMessage as error:
            log.error("%s cannot be told its version %d: %s", connection.identity.id, version, error)
        except Exception as error:
            log.warning("%s takes no messages: %s: %s", connection.identity.id, type(error).__name__, error)
            connection.telling = None
            await self._cut(connection, "it takes no messages")
            return
        connection.told = version
        connection.telling = None
        self._bell.set()  # for what changed meanwhile

    async def _doorbell(self) -> None:
        """Wait for doorbells from other processes. While the bell is broken, the slow look-up does the work."""
        layer = get_channel_layer()
        channel = await layer.new_channel()
        await layer.group_add(AGENT_SOCKETS, channel)
        while True:
            self.causes.note(await layer.receive(channel))
            self._bell.set()

    async def _revocations(self) -> None:
        await asyncio.sleep(REVOKED_EVERY_S)
        prefixes = {connection.identity.prefix: connection for connection in self.connections.values()}
        if prefixes:
            for prefix in await self.in_database(credentials_revoked, list(prefixes)):
                await self._cut(prefixes[prefix], "its credential was revoked")
