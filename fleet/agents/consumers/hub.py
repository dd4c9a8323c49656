"""The sessions of the agents that are connected to this process. Reports are merged and stored once a second, or
immediately after a change. Desired state is read after a wake-up and every second. The event loop never queries
PostgreSQL: each kind of work has its own thread and connection outside the pool, so that unauthenticated requests that
keep the credential lookup busy do not delay reports."""

import asyncio
import contextlib
import logging
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

from channels.layers import get_channel_layer
from django.conf import settings
from django.db import DatabaseError, InterfaceError, OperationalError, close_old_connections, connections

from engine_agent.protocol.codec import BadMessage
from engine_agent.protocol.messages import CertificateRequest, DownMessage, Hello, UpMessage
from engine_agent.protocol.states import AgentKind
from engine_agent.protocol.ticks import seconds_to_tick
from fleet.agents.consumers.certificates import CertificateExchange
from fleet.agents.consumers.limits import (
    Backlog,
    Batches,
    CredentialFilter,
    Delays,
    HelloQueue,
    Lane,
    PendingCauses,
    TokenBucket,
    lane_thread,
)
from fleet.agents.services.enrolment import (
    AgentIdentity,
    agents_identify,
    credential_prefixes,
    credentials_bind,
    credentials_replaced,
    credentials_revoked,
)
from fleet.faults.services.watch import CHECK_EVERY_S, ControlHostWatch, ControlLoopWatch
from fleet.nodes.planner import QUIET_AFTER
from fleet.nodes.services.reports import listener_renew
from fleet.releases.services.releases import agent_refused
from kernel import clock
from kernel.live import AGENT_SOCKETS, TRUST_CHANGED
from kernel.metrics import AGENTS_CONNECTED
from kernel.refusals import Conflict

FLUSH_EVERY_S = 1.0
URGENT_PAUSE_S = 0.05
"""Collects related changes, such as those of a cell's ranks, into one write."""
STORM_PAUSE_S = 0.5
"""The same while many agents connect, when a write would otherwise follow every few hellos."""
REVOKED_EVERY_S = 5.0
SEND_LIMIT_S = 10.0
"""An agent that accepts no message for so long counts as gone."""
CLOSE_LIMIT_S = 1.0
HEARTBEATS_APART_S = 0.2
"""Heartbeats at shorter intervals count towards the limits of messages."""
LATE_S = 0.5
"""After a longer pause of this process its agents' messages may still be waiting to be read."""
MEASURED_EVERY_S = 1.0
DATABASE_AWAY = (OperationalError, InterfaceError)
"""Errors of a flush that concern the database; other errors concern one report."""
STORES_AGAIN_WITHIN_S = 60.0
"""Longer than a failover of PostgreSQL. Afterwards agents are sent to another web process, if there is one."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentSession:
    """One open socket. `sent_version`: version of the last message sent, as its handler counts them.

    `sending`: the send in progress. After `is_cut`, messages from the agent are ignored. `trust_version` and
    `tls_version` (ingresses only): last sent versions. `requests`: its budget for certificates. `listener`: this
    process, once connected. `is_certified`: the agent presented its certificate. `heard_at_s`: monotonic time of its
    last message; `is_quiet`: it has sent nothing for `QUIET_AFTER`. `expect_heartbeat`: names the heartbeat that is
    taken from the connection without decoding."""

    identity: AgentIdentity
    hello: Hello
    send: Callable[[DownMessage], Awaitable[None]]
    close: Callable[[str], Awaitable[None]]
    is_certified: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: datetime = field(default_factory=clock.now)
    sent_version: int = -1
    sending: "asyncio.Task[None] | None" = None
    is_cut: bool = False
    trust_version: str = ""
    tls_version: str = ""
    requests: TokenBucket | None = None
    listener: str = ""
    heard_at_s: float = field(default_factory=monotonic)
    is_quiet: bool = False
    expect_heartbeat: Callable[[bytes], None] = lambda frame: None


class AgentHandler(Protocol):
    """What differs between kinds of agents: how reports are kept, and what is sent.

    `on_message`, `on_quiet` and `on_disconnect` run on the event loop and only store values; the others run in the
    database thread."""

    def on_hellos(self, hellos: Sequence[Hello]) -> dict[str, Conflict]:
        """Stores the hellos of new sessions. Returns the rejected agents with the reason."""

    def on_message(self, session: AgentSession, message: UpMessage) -> bool:
        """Keeps a message. Returns True if a change needs an early flush."""

    def on_quiet(self, session: AgentSession, heard_at: datetime) -> None:
        """The agent has sent nothing since `heard_at`, although its connection is open."""

    def on_disconnect(self, session: AgentSession) -> None:
        pass

    @property
    def is_waiting(self) -> bool:
        """Whether `flush` has something to store."""

    def flush(self) -> None: ...

    def desired_messages(self, sessions: Sequence[AgentSession]) -> dict[str, tuple[int, DownMessage]]:
        """Returns the current version and message, by agent ID, for sessions that were last sent another version."""


def _identify(credentials: list[str]) -> list[AgentIdentity | None]:
    found = agents_identify(credentials)
    if successors := [identity.prefix for identity in found if identity and identity.is_successor]:
        credentials_replaced(successors, now=clock.now())
    return found


class AgentHub:
    """All agents of this process and the loops that serve them. The first connection starts it."""

    def __init__(self, handlers: dict[AgentKind, AgentHandler]) -> None:
        self.handlers = handlers
        self.listener = uuid.uuid4().hex[:16]
        self.sessions: dict[str, AgentSession] = {}
        self.causes = PendingCauses()
        self.credential_filter = CredentialFilter()
        self._newest_credential = 0
        self.hello_queue = HelloQueue()
        self._identities = Batches(self._look_up)
        self._bindings: Batches[str, None] = Batches(self._bind)
        self._hellos = {kind: Batches(partial(self._store_hellos, handler)) for kind, handler in handlers.items()}
        self._lanes = {lane: lane_thread(lane) for lane in Lane}
        self._certificates = CertificateExchange(partial(self.in_database, Lane.CERTIFICATES), self._send_in_time)
        self._loop_watch = ControlLoopWatch()
        self._host_watch = ControlHostWatch()
        self.is_listener_full: Callable[[], bool] = lambda: False
        """Whether agents are turned away before their hello."""
        self._backlog = Backlog()
        self._keeps_up = True
        self._stored_at_s = monotonic()
        self._urgent = asyncio.Event()
        self._wake_up = asyncio.Event()
        self._trust = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []

    async def in_database(self, lane: Lane, call: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking call in the thread of this lane."""

        def guarded() -> T:
            close_old_connections()
            try:
                return call(*arguments)
            finally:
                close_old_connections()

        return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], guarded)

    def start(self) -> None:
        """Starts the loops; a second call does nothing."""
        if not self._loops:
            self._stored_at_s = monotonic()
            loops = (
                *(self._backlog_loop, self._lease_loop, self._flush_loop, self._send_loop),
                *(self._wake_up_loop, self._revocation_loop, self._watch_loop, self._prefix_loop, self._trust_loop),
            )
            self._loops = [asyncio.create_task(self._for_ever(loop)) for loop in loops]

    async def stop(self) -> None:
        """Ends the loops and database threads, for tests."""
        ending, self._loops = set(self._loops), []
        while ending:  # a library may swallow one cancellation
            for task in ending:
                task.cancel()
            _, ending = await asyncio.wait(ending, timeout=0.2)
        self._certificates.stop()
        for thread in self._lanes.values():
            closed = thread.submit(connections.close_all)
            thread.shutdown(wait=False)  # in the same step: a call in between would open a connection again
            await asyncio.wrap_future(closed)

    async def identify(self, credential: str) -> AgentIdentity | None:
        """Returns the agent of this credential; None if it is unknown or revoked."""
        return await self._identities.ask(credential)

    async def bind(self, identity: AgentIdentity) -> None:
        """The agent presented its certificate: from now on its credential is valid only with it."""
        if not identity.is_bound:
            await self._bindings.ask(identity.prefix)

    async def note_refused(self, identity: AgentIdentity, reason: str) -> None:
        """Records in the timeline why an agent was rejected. The agent retries."""
        try:
            await self.in_database(Lane.HELLOS, lambda: agent_refused(identity, reason, now=clock.now()))
        except DatabaseError as error:
            log.warning("the refusal of %s was not recorded: %s", identity.id, error)

    async def _look_up(self, credentials: list[str]) -> list[AgentIdentity | None]:
        return await self.in_database(Lane.CREDENTIALS, _identify, credentials)

    async def _bind(self, prefixes: list[str]) -> list[None]:
        await self.in_database(Lane.HELLOS, lambda: credentials_bind(prefixes, now=clock.now()))
        return [None] * len(prefixes)

    async def _store_hellos(self, handler: AgentHandler, hellos: list[Hello]) -> list[Conflict | None]:
        refused = await self.in_database(Lane.HELLOS, handler.on_hellos, hellos)
        return [refused.get(hello.id) for hello in hellos]

    async def connect(self, session: AgentSession) -> None:
        """Starts a session and cuts an older one of the same agent."""
        session.listener = self.listener
        await self._hellos[session.identity.kind].ask(session.hello)
        older = self.sessions.get(session.identity.id)
        self.sessions[session.identity.id] = session
        if older is not None:
            await self._cut(older, "replaced by a newer connection of this agent")
        self._urgent.set()
        self._wake_up.set()

    def receive(self, session: AgentSession, message: UpMessage) -> None:
        """Passes a message to the session's handler. Raises BadMessage if it contradicts earlier ones."""
        session.heard_at_s, session.is_quiet = monotonic(), False
        if isinstance(message, CertificateRequest):
            self._certificates.request(session, message)
        elif not session.is_cut and self._handler(session).on_message(session, message):
            self._urgent.set()

    def take_heartbeat(self, session: AgentSession) -> bool:
        """The expected heartbeat arrived. Returns False if it must be received like any other message: it ends a
        silence, follows another message too soon, or the session was cut."""
        now_s = monotonic()
        if session.is_quiet or session.is_cut or now_s - session.heard_at_s < HEARTBEATS_APART_S:
            return False
        session.heard_at_s = now_s
        return True

    def disconnect(self, session: AgentSession) -> None:
        """Ends a session. A second call does nothing."""
        if self.sessions.get(session.identity.id) is session:
            del self.sessions[session.identity.id]
        if session.sending is not None:
            session.sending.cancel()
        self._handler(session).on_disconnect(session)
        self._urgent.set()

    def _handler(self, session: AgentSession) -> AgentHandler:
        return self.handlers[session.identity.kind]

    async def _cut(self, session: AgentSession, reason: str) -> None:
        """End a session from our side. An agent that does not even take the close frame is not waited for."""
        session.is_cut = True
        self.disconnect(session)
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await session.close(reason)
        except Exception as error:
            log.debug("closing %s: %s", session.identity.id, error)

    # --- loops ------------------------------------------------------------------------------------------------------

    async def _for_ever(self, step: Callable[[], Awaitable[None]]) -> None:
        """An unavailable database or channel layer must not end a loop."""
        while True:
            try:
                await step()
            except Exception as error:
                log.warning("%s: %s: %s", step.__name__.strip("_"), type(error).__name__, error)
                await asyncio.sleep(1.0)

    async def _backlog_loop(self) -> None:
        """Measures whether this process keeps up. Uses no database, which may be the cause of the delay."""
        began_s = monotonic()
        await asyncio.sleep(MEASURED_EVERY_S)
        now_s = monotonic()
        delays = Delays(
            lag_s=now_s - began_s - MEASURED_EVERY_S,
            unanswered_s=max(self._identities.unanswered_s, *(each.unanswered_s for each in self._hellos.values())),
            unstored_s=now_s - self._stored_at_s,
            turned_away=self.hello_queue.has_waiting or self.is_listener_full(),
        )
        self._keeps_up = self._backlog.keeps_up(delays, now_s)
        if delays.lag_s < LATE_S:
            self._note_quiet_sessions(now_s)
        unstored_s = delays.unstored_s - delays.lag_s  # a process that was paused made no attempt
        if unstored_s > STORES_AGAIN_WITHIN_S and len(settings.AGENT_URLS) > 1:
            self._stored_at_s = now_s
            log.error("no report was stored for %.0f s: agents are sent to another host", unstored_s)
            sessions = list(self.sessions.values())
            await asyncio.gather(*(self._cut(session, "this host stores no reports") for session in sessions))

    def _note_quiet_sessions(self, now_s: float) -> None:
        quiet_after_s = QUIET_AFTER.total_seconds()
        for session in self.sessions.values():
            if not session.is_quiet and now_s - session.heard_at_s > quiet_after_s:
                session.is_quiet = True
                heard_at = clock.now() - timedelta(seconds=now_s - session.heard_at_s)
                self._handler(session).on_quiet(session, heard_at)
                self._urgent.set()

    async def _lease_loop(self) -> None:
        keeps_up = self._keeps_up
        await self.in_database(
            Lane.REPORTS, lambda: listener_renew(listener=self.listener, keeps_up=keeps_up, now=clock.now())
        )
        connected = Counter(session.identity.kind for session in self.sessions.values())
        for kind in self.handlers:
            AGENTS_CONNECTED.labels(kind.value).set(connected[kind])
        await asyncio.sleep(_seconds_to_tick())

    async def _flush_loop(self) -> None:
        try:
            async with asyncio.timeout(_seconds_to_tick()):
                await self._urgent.wait()
            await asyncio.sleep(STORM_PAUSE_S if self.hello_queue.is_crowded else URGENT_PAUSE_S)
        except TimeoutError:
            pass
        self._urgent.clear()
        waiting = (handler for handler in self.handlers.values() if handler.is_waiting)
        flushes = (self.in_database(Lane.REPORTS, handler.flush) for handler in waiting)
        failed = [error for error in await asyncio.gather(*flushes, return_exceptions=True) if error is not None]
        if not any(isinstance(error, DATABASE_AWAY) for error in failed):
            self._stored_at_s = monotonic()
        if failed:  # after all handlers: a failing one must not stop the others
            raise failed[0]

    async def _send_loop(self) -> None:
        try:
            async with asyncio.timeout(_seconds_to_tick()):
                await self._wake_up.wait()
        except TimeoutError:
            pass
        self._wake_up.clear()
        began = monotonic()
        idle: defaultdict[AgentKind, list[AgentSession]] = defaultdict(list)
        for session in self.sessions.values():
            if session.sending is None:
                idle[session.identity.kind].append(session)
        for kind, sessions in idle.items():
            messages = await self.in_database(Lane.ORDERS, self.handlers[kind].desired_messages, sessions)
            if messages:
                for session in sessions:
                    if session.identity.id in messages:
                        version, message = messages[session.identity.id]
                        sending = self._send(session, version, self.causes.attach(session.identity.id, message))
                        session.sending = asyncio.create_task(sending)
        # It reads all sessions and versions. Under constant wake-ups the pause leaves half of the time to other work.
        # Agents that connect again have orders already, so while many do, it runs once a second.
        least_s = FLUSH_EVERY_S if self.hello_queue.is_crowded else 0.0
        await asyncio.sleep(max(least_s, min(monotonic() - began, FLUSH_EVERY_S)))

    async def _send(self, session: AgentSession, version: int, message: DownMessage) -> None:
        """Runs as its own task, so that an agent that accepts no messages delays no other."""
        if not await self._send_in_time(session, message, f"its version {version}"):
            return
        session.sent_version = version
        session.sending = None
        self._wake_up.set()  # for later changes

    async def _send_in_time(self, session: AgentSession, message: DownMessage, what: str) -> bool:
        """Returns False if the agent did not accept it in time and was cut."""
        try:
            async with asyncio.timeout(SEND_LIMIT_S):
                await session.send(message)
        except BadMessage as error:
            log.error("%s cannot be sent %s: %s", session.identity.id, what, error)
        except Exception as error:
            log.warning("%s accepts no messages: %s: %s", session.identity.id, type(error).__name__, error)
            session.sending = None
            await self._cut(session, "it accepts no messages")
            return False
        return True

    async def _wake_up_loop(self) -> None:
        """Receives wake-ups from other processes. Without them the periodic query does the work."""
        layer = get_channel_layer()
        channel = await layer.new_channel()
        await layer.group_add(AGENT_SOCKETS, channel)
        while True:
            hint = await layer.receive(channel)
            self.causes.record(hint)
            (self._trust if hint.get("type") == TRUST_CHANGED else self._wake_up).set()

    async def _revocation_loop(self) -> None:
        await asyncio.sleep(REVOKED_EVERY_S)
        prefixes = {session.identity.prefix: session for session in self.sessions.values()}
        if prefixes:
            for prefix in await self.in_database(Lane.ORDERS, credentials_revoked, list(prefixes)):
                await self._cut(prefixes[prefix], "its credential was revoked")

    async def _trust_loop(self) -> None:
        await self._certificates.tell(list(self.sessions.values()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_seconds_to_tick()):
                await self._trust.wait()
        self._trust.clear()

    async def _prefix_loop(self) -> None:
        newest, prefixes = await self.in_database(Lane.ORDERS, credential_prefixes, self._newest_credential)
        self._newest_credential = newest
        self.credential_filter.add_prefixes(prefixes)
        await asyncio.sleep(_seconds_to_tick())

    async def _watch_loop(self) -> None:
        """Watches the control loops and other control hosts: a stopped one cannot report it itself."""
        await asyncio.sleep(CHECK_EVERY_S)
        await self.in_database(Lane.ORDERS, lambda: self._loop_watch.check(clock.now()))
        await self.in_database(Lane.ORDERS, lambda: self._host_watch.check(clock.now()))


def _seconds_to_tick() -> float:
    return seconds_to_tick(asyncio.get_running_loop().time())
