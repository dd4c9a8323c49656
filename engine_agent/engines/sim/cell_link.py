"""The connection between leader and followers of a cell: handshake, then one JSON frame a line in both directions.
`LeaderLink` admits followers that authenticate, and detects when one is gone. `FollowerLink` finds the leader, retries
until `rendezvous_timeout_s` because members start in any order, and sends heartbeats. A connection is never renewed: a
cell that lost a member has failed. The links report and leave consequences to the member."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from msgspec import Struct

from engine_agent.engines.handshake import (
    MAX_LINE_BYTES,
    FollowerHandshake,
    HandshakeFailed,
    LeaderCertificate,
    LeaderHandshake,
    MembershipRefused,
    binding_of,
    follower_context,
    retry_pauses_s,
    without_tls,
)
from engine_agent.engines.openai_http import bind_port
from engine_agent.engines.sim.faults import Effects, Faults
from engine_agent.engines.sim.settings import HANDSHAKE_TIMEOUT_S, HEARTBEAT_S, SILENT_BEATS, Settings
from engine_agent.protocol.local_servers import closing_connections
from engine_agent.protocol.messages import StepTimes


class BadFrame(ValueError):
    """A line that is not a frame of this protocol."""


class Beat(Struct, frozen=True, tag="beat"):
    """A heartbeat with the effects of the sender's faults and, from a leader, the cell's step times. Each beat repeats
    everything."""

    effects: Effects = Effects()
    work: StepTimes = StepTimes()


class Farewell(Struct, frozen=True, tag="farewell"):
    """Sent before the sender exits: stopped on purpose (`failed` False) or because the cell failed."""

    reason: str
    failed: bool


Frame = Beat | Farewell

_encoder = msgspec.json.Encoder()
_decoder: "msgspec.json.Decoder[Frame]" = msgspec.json.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame) + b"\n"


async def read_line(reader: asyncio.StreamReader, timeout_s: float) -> bytes:
    """Returns the next line of a connection. Raises EOFError if the other side closed the connection, or its process is
    gone. Raises TimeoutError if nothing arrived for `timeout_s` seconds. Raises BadFrame if the line is too long."""
    async with asyncio.timeout(timeout_s):
        try:
            line = await reader.readline()
        except ValueError as error:
            raise BadFrame(f"a line longer than {MAX_LINE_BYTES} bytes") from error
        except OSError as error:
            raise EOFError(str(error)) from error
    if not line.endswith(b"\n"):
        raise EOFError("closed")
    return line


async def read_frame(reader: asyncio.StreamReader, timeout_s: float) -> Frame:
    """Returns the next frame of a connection. Raises EOFError, TimeoutError (see `read_line`). Raises BadFrame if it is
    not a frame."""
    line = await read_line(reader, timeout_s)
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from error


async def read_living(reader: asyncio.StreamReader) -> Frame:
    """Returns the next frame of a member that sends heartbeats. It waits for one heartbeat at a time: after a stall of
    this process, frames that arrived meanwhile are read before the member counts as silent. Raises EOFError, BadFrame
    (see `read_frame`). Raises TimeoutError if `SILENT_BEATS` heartbeats in a row did not arrive."""
    for _ in range(SILENT_BEATS - 1):
        try:
            return await read_frame(reader, HEARTBEAT_S)
        except TimeoutError:
            continue
    return await read_frame(reader, HEARTBEAT_S)


log = logging.getLogger(__name__)


class CellWatcher(Protocol):
    """Receives the events of the cell's members."""

    def work(self) -> StepTimes:
        """Returns what a healthy member computed since the cell started."""

    def follower_joined(self) -> None:
        """Another follower is connected; see `LeaderLink.missing`."""

    def follower_lost(self, reason: str) -> None:
        """A connected follower is gone, and with it the cell."""

    def follower_unfit(self, reason: str) -> None:
        """A member of this cell runs other software than the leader: the cell cannot form."""

    def follower_leaving(self, reason: str) -> None:
        """A follower is stopping and waits for the cell to finish its requests."""

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
    """The rendezvous port and all connections to it."""

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
        """Returns the faults that each follower last reported."""
        return tuple(follower.effects for follower in self._followers.values())

    async def listen(self, certificate: LeaderCertificate) -> None:
        """Opens the rendezvous port. Raises PortTaken if it cannot be bound."""
        rendezvous = bind_port(self._settings.leader)
        self._server = await asyncio.start_server(
            closing_connections(partial(self._serve, certificate.binding)),
            sock=rendezvous,
            limit=MAX_LINE_BYTES,
            ssl=certificate.context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )

    def close(self, reason: str, failed: bool) -> None:
        """Sends every follower the reason for the end of the cell, and disconnects."""
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
            log.warning("rendezvous: a connection did not authenticate: %s", str(error) or type(error).__name__)
            return None
        writer.write(decision.reply)
        if decision.incompatible:
            self._watcher.follower_unfit(decision.reason)
            return None
        if decision.joined is None:
            log.warning("rendezvous: refused a follower: %s", decision.reason)
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
        beating = asyncio.create_task(_send_heartbeats(follower.writer, self._watcher.work))
        try:
            reason = await self._listen_to(follower, reader)
        finally:
            beating.cancel()
        del self._followers[follower.rank]
        if not self._closing:
            self._watcher.follower_lost(f"{follower} {reason}")

    async def _listen_to(self, follower: _Follower, reader: asyncio.StreamReader) -> str:
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
                self._watcher.follower_leaving(f"{follower} is stopping: {frame.reason}")
            elif frame.effects != follower.effects:
                follower.effects = frame.effects
                self._watcher.effects_changed()


async def _send_heartbeats(writer: asyncio.StreamWriter, work: Callable[[], StepTimes]) -> None:
    # The reader reports a dead connection.
    with contextlib.suppress(OSError):
        while True:
            writer.write(encode(Beat(work=work())))
            await writer.drain()
            await asyncio.sleep(HEARTBEAT_S)


class NoLeader(Exception):
    """The leader was not reached, or is gone; the text states which, and why."""


class FollowerLink:
    def __init__(
        self,
        settings: Settings,
        faults: Faults,
        on_retry: Callable[[str], None],
        on_work: Callable[[StepTimes], None] = lambda _: None,
    ) -> None:
        """`on_work` receives with every heartbeat what the cell computed since it started."""
        self._on_work = on_work
        self._settings = settings
        self._faults = faults
        self._on_retry = on_retry
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._beat_now = asyncio.Event()
        faults.subscribe(self._beat_now.set)

    async def connect(self) -> None:
        """Connects to the leader and joins the cell; `on_retry` receives the reason for each further attempt. Raises
        NoLeader if the leader is not reached within `rendezvous_timeout_s` seconds, or the leader refused
        permanently."""
        reason = "no attempt was made"
        try:
            async with asyncio.timeout(self._settings.rendezvous_timeout_s):
                for pause_s in retry_pauses_s():
                    try:
                        await self._attempt()
                        return
                    except MembershipRefused as error:
                        raise NoLeader(str(error)) from error
                    except HandshakeFailed as error:
                        reason = str(error)
                    self._on_retry(reason)
                    await asyncio.sleep(pause_s)
        except TimeoutError as error:
            limit = f"{self._settings.rendezvous_timeout_s:g} s"
            raise NoLeader(f"no leader at {self._settings.leader} within {limit}: {reason}") from error

    async def stay(self) -> Farewell:
        """Sends heartbeats until the leader ends the cell, and returns its farewell. Raises NoLeader if the leader
        disappeared without one."""
        if self._reader is None or self._writer is None:
            raise NoLeader("not connected")
        beating = asyncio.create_task(self._send_heartbeats(self._writer))
        try:
            while True:
                frame = await read_living(self._reader)
                if isinstance(frame, Farewell):
                    return frame
                if isinstance(frame, Beat):
                    self._on_work(frame.work)
        except EOFError as error:
            raise NoLeader("the leader is gone: its connection closed") from error
        except TimeoutError as error:
            raise NoLeader(f"the leader is silent for {SILENT_BEATS * HEARTBEAT_S:g} s") from error
        except BadFrame as error:
            raise NoLeader(f"the leader sent something unreadable: {error}") from error
        finally:
            beating.cancel()

    def announce_leaving(self, reason: str) -> bool:
        """Requests that the leader finishes what is in flight and ends the cell. Returns False if there is no
        leader."""
        if self._writer is None:
            return False
        self._writer.write(encode(Farewell(reason=reason, failed=False)))
        return True

    async def _attempt(self) -> None:
        leader = self._settings.leader
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    leader.host, leader.port, limit=MAX_LINE_BYTES, ssl=follower_context()
                )
        except TimeoutError as error:
            raise HandshakeFailed("it does not answer") from error
        except ssl.SSLError as error:
            raise HandshakeFailed(without_tls(error)) from error
        except OSError as error:
            raise HandshakeFailed(error.strerror or str(error)) from error
        try:
            await self._shake_hands(reader, writer)
        except (HandshakeFailed, MembershipRefused):
            writer.close()
            raise
        except (EOFError, TimeoutError, BadFrame, OSError) as error:
            writer.close()
            raise HandshakeFailed(f"the handshake broke off: {str(error) or type(error).__name__}") from error
        self._reader, self._writer = reader, writer

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        handshake = FollowerHandshake(self._settings.identity, binding_of(certificate))
        writer.write(handshake.join(await read_line(reader, HANDSHAKE_TIMEOUT_S)))
        handshake.confirm(await read_line(reader, HANDSHAKE_TIMEOUT_S))

    async def _send_heartbeats(self, writer: asyncio.StreamWriter) -> None:
        # The reader reports a dead connection.
        with contextlib.suppress(OSError):
            while True:
                self._beat_now.clear()
                writer.write(encode(Beat(effects=self._faults.effects())))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._beat_now.wait(), HEARTBEAT_S)
