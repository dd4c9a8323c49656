"""The follower's side of the cell: finds the leader, proves itself, keeps beating, and says how the connection ended.

It retries until `rendezvous_timeout_s` because members start in any order; once connected it never reconnects, as a
cell that lost a member is over.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable

from engine_agent.engines.cell.handshake import (
    MAX_LINE_BYTES,
    FollowerHandshake,
    HandshakeFailed,
    MembershipRefused,
    retry_pauses_s,
)
from engine_agent.engines.cell.tls import binding_of, follower_context, without_tls
from engine_agent.engines.sim.faults import Faults
from engine_agent.engines.sim.frames import BadFrame, Beat, Farewell, encode, read_line, read_living
from engine_agent.engines.sim.settings import HANDSHAKE_TIMEOUT_S, HEARTBEAT_S, SILENT_BEATS, Settings
from engine_agent.protocol.messages import StepTimes

log = logging.getLogger(__name__)


class NoLeader(Exception):
    """The leader was not reached, or is gone; the text says which, and why."""


class FollowerLink:
    def __init__(
        self,
        settings: Settings,
        faults: Faults,
        on_retry: Callable[[str], None],
        on_work: Callable[[StepTimes], None] = lambda _: None,
    ) -> None:
        """`on_work` hears with every beat what the cell computed since it started."""
        self._on_work = on_work
        self._settings = settings
        self._faults = faults
        self._on_retry = on_retry
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._beat_now = asyncio.Event()
        faults.subscribe(self._beat_now.set)

    async def connect(self) -> None:
        """Reach the leader and be taken in; `on_retry` hears why it took another attempt.

        Raises:
            NoLeader: not within `rendezvous_timeout_s` seconds, or the leader refused for good.
        """
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
        """Beat until the leader ends the cell, and return its farewell.

        Raises:
            NoLeader: it went without one.
        """
        if self._reader is None or self._writer is None:
            raise NoLeader("not connected")
        beating = asyncio.create_task(self._beat_for_ever(self._writer))
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
        """Ask the leader to finish what is in flight and end the cell. False: there is no leader to ask."""
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
            await self._introduce(reader, writer)
        except (HandshakeFailed, MembershipRefused):
            writer.close()
            raise
        except (EOFError, TimeoutError, BadFrame, OSError) as error:
            writer.close()
            raise HandshakeFailed(f"the handshake broke off: {str(error) or type(error).__name__}") from error
        self._reader, self._writer = reader, writer

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        handshake = FollowerHandshake(self._settings.identity, binding_of(certificate))
        writer.write(handshake.join(await read_line(reader, HANDSHAKE_TIMEOUT_S)))
        handshake.confirm(await read_line(reader, HANDSHAKE_TIMEOUT_S))

    async def _beat_for_ever(self, writer: asyncio.StreamWriter) -> None:
        # A dead connection shows itself to the reader; the writer has nothing to add.
        with contextlib.suppress(OSError):
            while True:
                self._beat_now.clear()
                writer.write(encode(Beat(effects=self._faults.effects())))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._beat_now.wait(), HEARTBEAT_S)
