"""A follower's side of the cell: finds the leader, authenticates, sends heartbeats, and detects when the leader is
gone. It retries until `join_timeout_s` because members start in any order. A connection is never renewed: a cell that
lost a member has failed. The end of the follower is reported once, through `end`."""

import contextlib
import socket
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep

from engine_agent.engines.handshake import (
    FollowerHandshake,
    HandshakeFailed,
    MembershipRefused,
    binding_of,
    follower_context,
    retry_pauses_s,
)
from engine_agent.engines.vllm.cell.channel import (
    HANDSHAKE_TIMEOUT_S,
    Channel,
    ChannelClosed,
    Kind,
    receive_line,
    secure,
    send_line,
)
from engine_agent.engines.vllm.cell.leader_link import BEAT_S, PROGRESS, HangDetector
from engine_agent.engines.vllm.cell.member import CellEnded, Member
from engine_agent.protocol.fingerprint import Fingerprint

End = Callable[[str, bool], None]
"""Called with the reason, and whether it is a failure."""


class FollowerLink:
    """One connection to the leader. `done` is the number of the last call that was finished here."""

    def __init__(self, follower: Member, secret: bytes, fingerprint: Fingerprint, end: End) -> None:
        self._follower, self._end = follower, end
        self._identity = follower.identity(secret, fingerprint)
        self._channel: Channel | None = None
        self._calls: SimpleQueue[bytes] = SimpleQueue()
        self._hang_detector: HangDetector | None = None
        self.on_ready: Callable[[], None] = lambda: None
        self.done = 0
        self.finished: Callable[[int], int] = lambda own: own
        """The last call that the whole node has finished; its argument: that its first worker has."""

    @property
    def ready(self) -> bool:
        """Whether the leader has reported that the engine is up."""
        return self._hang_detector is not None

    def connect(self, on_retry: Callable[[str], None]) -> bytes:
        """Joins the cell; returns what the leader publishes to its followers. `on_retry` receives the reason for each
        further attempt. Raises CellEnded if no leader was reached in time, it refused this member, or it disappeared
        again."""
        where = f"{self._follower.leader_address}:{self._follower.leader_port}"
        ends_at = monotonic() + self._follower.join_timeout_s
        for pause_s in retry_pauses_s():
            try:
                self._channel = self._attempt()
                break
            except MembershipRefused as error:
                raise CellEnded(f"the leader refused: {error}") from error
            except HandshakeFailed as error:
                reason = f"no leader at {where}: {error}"
            if monotonic() >= ends_at:
                raise CellEnded(f"{reason}, for {self._follower.join_timeout_s:g} s")
            on_retry(reason)
            sleep(pause_s)
        return self._setup()

    def start(self) -> None:
        """Starts to send heartbeats and to listen to the leader."""
        for work in (self._listen, self._beat):
            Thread(target=work, name=work.__name__.strip("_"), daemon=True).start()

    def next_call(self) -> tuple[int, bytes]:
        """Waits for the leader's next call; returns its number and its content, which may be unpickled."""
        payload = self._calls.get()
        return PROGRESS.unpack_from(payload)[0], payload[PROGRESS.size :]

    def reply(self, number: int, returned: bytes) -> None:
        self._send(Kind.REPLY, PROGRESS.pack(number) + returned)

    def fail(self, reason: str) -> None:
        """Sends the leader the failure that ends this follower."""
        self._send(Kind.FAILED, reason.encode())

    def announce_leaving(self) -> None:
        """Sends the leader that this follower will stop once the leader is done."""
        self._send(Kind.LEAVING)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _attempt(self) -> Channel:
        where = (self._follower.leader_address, self._follower.leader_port)
        try:
            connection = socket.create_connection(where, HANDSHAKE_TIMEOUT_S, (self._follower.address, 0))
        except OSError as error:
            raise HandshakeFailed(error.strerror or str(error)) from error
        try:
            secured = secure(connection, follower_context(), leads=False)
            handshake = FollowerHandshake(self._identity, binding_of(secured.peer_certificate))
            send_line(secured, handshake.join(receive_line(secured)))
            handshake.confirm(receive_line(secured))
        except BaseException:
            connection.close()
            raise
        secured.lift_limit()
        return Channel(secured)

    def _setup(self) -> bytes:
        try:
            message = self._connected().receive()
        except ChannelClosed as error:
            raise CellEnded(f"the leader is gone: {error}") from error
        if message.kind is Kind.FAREWELL:
            raise CellEnded(_farewell(message.payload))
        return message.payload

    def _listen(self) -> None:
        channel = self._connected()
        try:
            while (message := channel.receive()).kind is not Kind.FAREWELL:
                if message.kind is Kind.CALL:
                    self._calls.put(message.payload)
                if message.kind is Kind.READY:
                    self._hang_detector = HangDetector(self._follower.hang_s, {0: "the leader"}, monotonic())
                    self.on_ready()
                elif self._hang_detector is not None:
                    self._hang_detector.note_beat(0, 0, monotonic())
        except ChannelClosed as error:
            self._end(f"the leader is gone: {error}", True)
            return
        self._end(_farewell(message.payload), bool(message.payload[0]))

    def _beat(self) -> None:
        reason = ""
        while not reason:
            with contextlib.suppress(ChannelClosed):  # the listening thread reports it
                self._connected().beat(PROGRESS.pack(self.finished(self.done)))
            sleep(BEAT_S)
            reason = self._hang_detector.hang_reason(monotonic()) if self._hang_detector is not None else ""
        self._end(reason, True)

    def _send(self, kind: Kind, payload: bytes = b"") -> None:
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):  # the listening thread reports it
                self._channel.send(kind, payload)

    def _connected(self) -> Channel:
        if self._channel is None:
            raise CellEnded("not connected to a leader")
        return self._channel


def _farewell(payload: bytes) -> str:
    return f"the leader ended the cell: {payload[1:].decode(errors='replace')}"
