"""The agents that are connected to this process: who they are, what they said last, and what they were told.

Reports are coalesced here and written once a second, at once when something changed. What agents should be told is
looked up when a doorbell rings, and anyway every second. One thread talks to PostgreSQL; the event loop never does.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from channels.layers import get_channel_layer
from django.db import close_old_connections, connections

from controlplane.kernel import clock
from controlplane.kernel.leases import lease_take
from controlplane.kernel.live import AGENT_SOCKETS
from engine_agent.protocol.messages import DownMessage, Hello, UpMessage
from engine_agent.protocol.states import AgentKind
from fleet.selectors.snapshot import LISTENING_LEASE
from fleet.services.enrolment import AgentIdentity, credentials_revoked

FLUSH_EVERY_S = 1.0
URGENT_PAUSE_S = 0.05
"""Collects what changes together (the ranks of one cell) into one write."""
REVOKED_EVERY_S = 5.0
LISTENING_TTL_S = 5.0

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentConnection:
    """One open socket. `told` is what it was last sent, in whatever form its desk compares."""

    identity: AgentIdentity
    hello: Hello
    send: Callable[[DownMessage], Awaitable[None]]
    close: Callable[[str], Awaitable[None]]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    told: int = -1


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

    def to_tell(self, told: dict[str, int]) -> dict[str, tuple[int, DownMessage]]:
        """For agents (id -> version last told): the newer version and its message, where there is one."""


class AgentHub:
    """All agents of this process, and the loops that serve them. Started by the first connection."""

    def __init__(self, desks: dict[AgentKind, Desk]) -> None:
        self.desks = desks
        self.connections: dict[str, AgentConnection] = {}
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
        older = self.connections.get(connection.identity.id)
        self.connections[connection.identity.id] = connection
        if older is not None:
            await older.close("a newer connection of this agent took its place")
        desk = self.desks[connection.identity.kind]
        await self.in_database(desk.introduced, connection)
        self._urgent.set()
        self._bell.set()

    def heard(self, connection: AgentConnection, message: UpMessage) -> None:
        if self.desks[connection.identity.kind].heard(connection, message):
            self._urgent.set()

    def leave(self, connection: AgentConnection) -> None:
        if self.connections.get(connection.identity.id) is connection:
            del self.connections[connection.identity.id]
        self.desks[connection.identity.kind].left(connection)
        self._urgent.set()

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
        for desk in self.desks.values():
            await self.in_database(desk.flush)

    async def _tell_loop(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_EVERY_S):
                await self._bell.wait()
        except TimeoutError:
            pass
        self._bell.clear()
        for kind, desk in self.desks.items():
            told = {key: c.told for key, c in self.connections.items() if c.identity.kind is kind}
            if told:
                for key, (version, message) in (await self.in_database(desk.to_tell, told)).items():
                    await self._tell(key, version, message)

    async def _tell(self, key: str, version: int, message: DownMessage) -> None:
        connection = self.connections.get(key)
        if connection is not None:
            await connection.send(message)
            connection.told = version

    async def _doorbell(self) -> None:
        """Wait for doorbells from other processes. While the bell is broken, the slow look-up does the work."""
        layer = get_channel_layer()
        channel = await layer.new_channel()
        await layer.group_add(AGENT_SOCKETS, channel)
        while True:
            await layer.receive(channel)
            self._bell.set()

    async def _revocations(self) -> None:
        await asyncio.sleep(REVOKED_EVERY_S)
        prefixes = {connection.identity.prefix: connection for connection in self.connections.values()}
        if prefixes:
            for prefix in await self.in_database(credentials_revoked, list(prefixes)):
                await prefixes[prefix].close("its credential was revoked")
