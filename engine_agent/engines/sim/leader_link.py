"""The leader's side of the cell: lets followers in who prove themselves, and notices at once when one is gone.

It reports what it sees through `CellWatcher` and never decides what becomes of the engine. An unknown or unproved
caller changes nothing but a log line.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine_agent.engines.cell.handshake import MAX_LINE_BYTES, HandshakeFailed, LeaderHandshake
from engine_agent.engines.cell.tls import LeaderCertificate
from engine_agent.engines.sim.faults import Effects
from engine_agent.engines.sim.frames import BadFrame, Beat, Farewell, encode, read_line, read_living
from engine_agent.engines.sim.listening import bind_port
from engine_agent.engines.sim.settings import HANDSHAKE_TIMEOUT_S, HEARTBEAT_S, SILENT_BEATS, Settings
from engine_agent.protocol.local_servers import closing_connections
from engine_agent.protocol.messages import StepTimes

log = logging.getLogger(__name__)


class CellWatcher(Protocol):
    """Who wants to know of the cell's members, and knows what the cell computed."""

    def work(self) -> StepTimes:
        """What a healthy member computed since the cell started."""

    def follower_joined(self) -> None:
        """One more is connected; see `LeaderLink.missing`."""

    def follower_lost(self, reason: str) -> None:
        """One that was connected is gone, for good: a cell lives and dies whole."""

    def follower_unfit(self, reason: str) -> None:
        """A member of this cell came and runs something else than the leader: the cell cannot form."""

    def follower_leaving(self, reason: str) -> None:
        """One is stopping and waits for the cell to finish its requests."""

    def effects_changed(self) -> None:
        """A follower's faults changed; see `LeaderLink.effects`."""


@dataclass
class _Follower:
    node: str
    rank: int
    writer: asyncio.StreamWriter
    effects: Effects = field(default_factory=Effects)

    def __str__(self) -> str:
        return f"follower rank {self.rank} ({self.node})"


class LeaderLink:
    """The rendezvous port and everyone connected to it."""

    def __init__(self, settings: Settings, watcher: CellWatcher) -> None:
        self._settings = settings
        self._watcher = watcher
        self._followers: dict[int, _Follower] = {}
        self._server: asyncio.Server | None = None
        self._closing = False

    @property
    def missing(self) -> int:
        """Followers that are not connected yet."""
        return self._settings.followers - len(self._followers)

    def effects(self) -> tuple[Effects, ...]:
        """The faults that each follower last reported."""
        return tuple(follower.effects for follower in self._followers.values())

    async def listen(self, certificate: LeaderCertificate) -> None:
        """Open the rendezvous port.

        Raises:
            PortTaken: it cannot be bound.
        """
        rendezvous = bind_port(self._settings.leader)
        self._server = await asyncio.start_server(
            closing_connections(partial(self._serve, certificate.binding)),
            sock=rendezvous,
            limit=MAX_LINE_BYTES,
            ssl=certificate.context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )

    def close(self, reason: str, failed: bool) -> None:
        """Tell every follower why the cell ends, and hang up."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for follower in self._followers.values():
            follower.writer.write(encode(Farewell(reason=reason, failed=failed)))
            follower.writer.close()

    async def _serve(self, binding: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            follower = await self._admit(binding, reader, writer)
            if follower is not None:
                await self._attend(follower, reader)
        except OSError as error:
            log.warning("rendezvous: %s", error)

    async def _admit(
        self, binding: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Follower | None:
        handshake = LeaderHandshake(self._settings.identity, self._settings.followers, binding)
        writer.write(handshake.challenge)
        try:
            join = await read_line(reader, HANDSHAKE_TIMEOUT_S)
            decision = handshake.decide(join, self._why_taken, taken_for_good=False)
        except (EOFError, TimeoutError, BadFrame, HandshakeFailed) as error:
            log.warning("rendezvous: a caller did not introduce itself: %s", str(error) or type(error).__name__)
            return None
        writer.write(decision.reply)
        if decision.incompatible:
            self._watcher.follower_unfit(decision.reason)
            return None
        if decision.joined is None:
            log.warning("rendezvous: refused a caller: %s", decision.reason)
            return None
        follower = _Follower(decision.joined.node_id, decision.joined.rank, writer)
        self._followers[follower.rank] = follower
        log.info("%s joined", follower)
        self._watcher.follower_joined()
        return follower

    def _why_taken(self, rank: int) -> str:
        if rank in self._followers:
            return f"{self._followers[rank]} is connected already"
        return "the cell is ending" if self._closing else ""

    async def _attend(self, follower: _Follower, reader: asyncio.StreamReader) -> None:
        beating = asyncio.create_task(_beat_for_ever(follower.writer, self._watcher.work))
        try:
            reason = await self._listen_to(follower, reader)
        finally:
            beating.cancel()
        del self._followers[follower.rank]
        if not self._closing:
            self._watcher.follower_lost(f"{follower} {reason}")

    async def _listen_to(self, follower: _Follower, reader: asyncio.StreamReader) -> str:
        """Listen until it is gone, and return how it went."""
        while True:
            try:
                frame = await read_living(reader)
            except EOFError:
                return "is gone: its connection closed"
            except TimeoutError:
                return f"is silent for {SILENT_BEATS * HEARTBEAT_S:g} s"
            except BadFrame as error:
                return f"sent something unreadable: {error}"
            if isinstance(frame, Farewell):
                self._watcher.follower_leaving(f"{follower} was told to stop: {frame.reason}")
            elif frame.effects != follower.effects:
                follower.effects = frame.effects
                self._watcher.effects_changed()


async def _beat_for_ever(writer: asyncio.StreamWriter, work: Callable[[], StepTimes]) -> None:
    # A dead connection shows itself to the reader; the writer has nothing to add.
    with contextlib.suppress(OSError):
        while True:
            writer.write(encode(Beat(work=work())))
            await writer.drain()
            await asyncio.sleep(HEARTBEAT_S)
