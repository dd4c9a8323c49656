"""The follower's side of the cell: finds the leader, proves itself, keeps beating, and says how the connection ended.

It retries until `rendezvous_timeout_s` because members start in any order; once connected it never reconnects, as a
cell that lost a member is over.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from msgspec import structs

from engine_agent.engines.sim.faults import Faults
from engine_agent.engines.sim.frames import (
    MAX_FRAME_BYTES,
    BadFrame,
    Beat,
    Challenge,
    Farewell,
    Join,
    Refusal,
    Welcome,
    encode,
    is_proof,
    join_proof,
    new_nonce,
    read_frame,
    read_living,
    refusal_proof,
    welcome_proof,
)
from engine_agent.engines.sim.settings import HANDSHAKE_TIMEOUT_S, HEARTBEAT_S, SILENT_BEATS, Settings
from engine_agent.protocol.messages import StepTimes

log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.1
_RETRY_LONGEST_S = 1.0


class NoLeader(Exception):
    """The leader was not reached, or is gone; the text says which, and why."""


class _NotYet(Exception):
    """One attempt failed; the text says why."""


class FollowerLink:
    """One connection to the leader."""

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
        pause_s = _RETRY_FIRST_S
        try:
            async with asyncio.timeout(self._settings.rendezvous_timeout_s):
                while True:
                    try:
                        await self._attempt()
                        return
                    except _NotYet as error:
                        reason = str(error)
                    self._on_retry(reason)
                    await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                    pause_s = min(pause_s * 2, _RETRY_LONGEST_S)
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
                reader, writer = await asyncio.open_connection(leader.host, leader.port, limit=MAX_FRAME_BYTES)
        except TimeoutError as error:
            raise _NotYet("it does not answer") from error
        except OSError as error:
            raise _NotYet(error.strerror or str(error)) from error
        try:
            await self._introduce(reader, writer)
        except (_NotYet, NoLeader):
            writer.close()
            raise
        except (EOFError, TimeoutError, BadFrame, OSError) as error:
            writer.close()
            raise _NotYet(f"the handshake broke off: {str(error) or type(error).__name__}") from error
        self._reader, self._writer = reader, writer

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        settings = self._settings
        challenge = await read_frame(reader, HANDSHAKE_TIMEOUT_S)
        if not isinstance(challenge, Challenge):
            raise _NotYet("what listens there is no leader")
        runs = dict(settings.fingerprint)
        claim = Join(settings.node_id, settings.cell, settings.generation, settings.rank, new_nonce(), runs)
        join = structs.replace(claim, proof=join_proof(settings.secret, challenge, claim))
        writer.write(encode(join))
        answer = await read_frame(reader, HANDSHAKE_TIMEOUT_S)
        if isinstance(answer, Refusal):
            if is_proof(answer.proof, refusal_proof(settings.secret, challenge, join, answer.reason)):
                raise NoLeader(answer.reason)
            raise _NotYet(f"the leader refused: {answer.reason}")
        expected = welcome_proof(settings.secret, challenge, join)
        if not isinstance(answer, Welcome) or not is_proof(answer.proof, expected):
            raise _NotYet("what listens there does not prove that it is the leader")

    async def _beat_for_ever(self, writer: asyncio.StreamWriter) -> None:
        # A dead connection shows itself to the reader; the writer has nothing to add.
        with contextlib.suppress(OSError):
            while True:
                self._beat_now.clear()
                writer.write(encode(Beat(effects=self._faults.effects())))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._beat_now.wait(), HEARTBEAT_S)
