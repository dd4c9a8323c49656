"""The leader's side of the cell: admits followers that authenticate, and detects when one is gone or hangs. The end of
the cell is reported once, through `end`; the caller stops the process. A connection that does not authenticate changes
nothing but a line in the log."""

import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Event, Thread
from time import monotonic

from engine_agent.engines.handshake import HandshakeFailed, Joined, LeaderCertificate, LeaderHandshake
from engine_agent.engines.vllm.cell.channel import (
    Channel,
    ChannelClosed,
    Kind,
    Message,
    TlsConnection,
    receive_line,
    secure,
    send_line,
)
from engine_agent.engines.vllm.cell.member import CellEnded, Member
from engine_agent.protocol.fingerprint import Fingerprint

STALLED_S = 1.0
"""A longer pause between two checks means that this process itself stood still."""


@dataclass
class _Watched:
    name: str
    beat_at_s: float
    done: int = 0
    behind_since_s: float | None = None


class HangDetector:
    """Decides from heartbeats and calls whether a member hangs. Pure: `now_s` is seconds of a monotonic clock. A silent
    member hangs, and so does one that does not finish a step. Only steps are timed: other calls, such as writing
    weights to disk, may take as long as they need."""

    def __init__(self, hang_s: float, names: Mapping[int, str], now_s: float) -> None:
        self._hang_s = hang_s
        self._watched = {rank: _Watched(name, now_s) for rank, name in names.items()}
        self._called = 0
        self._checked_at_s = now_s

    def note_beat(self, rank: int, done: int, now_s: float) -> None:
        """A member reported a heartbeat, and the number of the last call that it finished."""
        watched = self._watched[rank]
        watched.beat_at_s = now_s
        if done > watched.done:
            watched.done = done
            watched.behind_since_s = now_s if done < self._called else None

    def step_called(self, number: int, now_s: float) -> None:
        self._called = number
        for watched in self._watched.values():
            if watched.behind_since_s is None:
                watched.behind_since_s = now_s

    def hang_reason(self, now_s: float) -> str:
        """Returns why the cell hangs; empty if it does not. Call it several times a second."""
        self._forgive_own_stall(now_s)
        for watched in self._watched.values():
            if now_s - watched.beat_at_s >= self._hang_s:
                return f"{watched.name} hangs: no heartbeat for {self._hang_s:g} s"
        stuck = [
            watched.name
            for watched in self._watched.values()
            if watched.behind_since_s is not None and now_s - watched.behind_since_s >= self._hang_s
        ]
        if stuck:
            return f"{' and '.join(stuck)} did not finish step {self._called} within {self._hang_s:g} s"
        return ""

    def _forgive_own_stall(self, now_s: float) -> None:
        stalled_s = now_s - self._checked_at_s
        self._checked_at_s = now_s
        if stalled_s < STALLED_S:
            return
        for watched in self._watched.values():
            watched.beat_at_s += stalled_s
            if watched.behind_since_s is not None:
                watched.behind_since_s += stalled_s


BEAT_S = 0.25
"""Interval of heartbeats, and of checks of the members' heartbeats."""
MAX_CALLERS = 64
"""Maximum connections in their handshake."""
PROGRESS = struct.Struct("!Q")
"""The number of a call: in a follower's heartbeat, and before a call and its reply."""

End = Callable[[str], None]


class _Incompatible(Exception):
    """A member of this cell runs other software than the leader: the cell cannot form; the text states the
    difference."""


@dataclass
class _Follower:
    joined: Joined
    channel: Channel
    replies: dict[int, bytes] = field(default_factory=dict)
    """By the number of their call."""
    given_up: set[int] = field(default_factory=set)
    """Calls whose caller has given up."""
    leaving: bool = False


class LeaderLink:
    def __init__(
        self, leader: Member, secret: bytes, certificate: LeaderCertificate, fingerprint: Fingerprint, end: End
    ) -> None:
        """Listens for followers on the node's address. Raises CellEnded if the port cannot be bound."""
        self._leader, self._end = leader, end
        self._identity = leader.identity(secret, fingerprint)
        self._certificate = certificate
        self._followers: dict[int, _Follower] = {}
        self._changed = Condition()
        self._mismatch = ""
        self._last_refusal = ""
        self._callers = 0
        self._closing = Event()
        self._called = self._own_done = 0
        self.finished: Callable[[int], int] = lambda own: own
        """The last call that the whole node has finished; its argument: that its first worker has."""
        self._hang_detector: HangDetector | None = None
        where = (leader.leader_address, leader.leader_port)
        try:
            self._listener = socket.create_server(where, backlog=MAX_CALLERS)
        except OSError as error:
            raise CellEnded(f"cannot listen for followers on {where[0]}:{where[1]}: {error.strerror}") from error

    def gather(self) -> None:
        """Waits until every follower has joined. Raises CellEnded if one did not join in time, or runs other software
        than the leader."""
        self._thread(self._accept, "rendezvous")
        with self._changed:
            complete = self._changed.wait_for(
                lambda: self._mismatch or len(self._followers) == self._leader.followers, self._leader.join_timeout_s
            )
            if self._mismatch:
                raise CellEnded(self._mismatch)
            if not complete:
                raise CellEnded(self._who_is_missing())

    def publish(self, setup: bytes) -> None:
        """Sends every follower what it needs to build its part of the engine."""
        self._send_all(Kind.SETUP, setup)

    def start_watching(self) -> None:
        """Announces that the engine is up; from now on heartbeats and steps are checked."""
        names = {0: str(self._leader)} | {rank: str(each.joined) for rank, each in self._followers.items()}
        self._hang_detector = HangDetector(self._leader.hang_s, names, monotonic())
        self._send_all(Kind.READY)
        self._thread(self._beat, "cell-beats")
        self._thread(self._watch, "cell-watch")

    def call(self, call: bytes) -> int:
        """Sends every follower a call; returns the call's number. Raises ValueError if the call is too long."""
        self._called += 1
        self._send_all(Kind.CALL, PROGRESS.pack(self._called) + call)
        return self._called

    def step_called(self, number: int) -> None:
        if self._hang_detector is not None:
            self._hang_detector.step_called(number, monotonic())

    def step_finished(self, number: int) -> None:
        self._own_done = number

    def replies(self, number: int, timeout_s: float | None) -> list[bytes]:
        """Returns each follower's result of a call, in the order of ranks. Raises TimeoutError if one did not reply in
        time."""
        ends_at = None if timeout_s is None else monotonic() + timeout_s
        return [self.reply(rank, number, ends_at) for rank in sorted(self._followers)]

    def reply(self, rank: int, number: int, ends_at: float | None = None) -> bytes:
        """Returns the result of one follower. Raises TimeoutError if it did not reply until `ends_at`."""
        follower = self._followers[rank]
        with self._changed:
            timeout_s = None if ends_at is None else max(0.0, ends_at - monotonic())
            if not self._changed.wait_for(lambda: number in follower.replies, timeout_s):
                follower.given_up.add(number)
                raise TimeoutError(f"{follower.joined} did not reply to call {number} in time")
            return follower.replies.pop(number)

    def close(self, reason: str, *, failed: bool) -> None:
        """Sends every follower the end of the cell, and disconnects."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        followers = list(self._followers.values())
        for follower in followers:
            with contextlib.suppress(ChannelClosed):
                follower.channel.send_last(Kind.FAREWELL, bytes([failed]) + reason.encode())
        for follower in followers:  # after all farewells: a calling thread continues with the next follower
            follower.channel.close()

    # --- joining ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                return
            if self._callers >= MAX_CALLERS:
                connection.close()
                continue
            self._callers += 1
            self._thread(partial(self._serve, connection, address), "follower")

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            secured = secure(connection, self._certificate.context, leads=True)
            follower = self._add(secured, self._admit(secured))
        except HandshakeFailed as error:
            self._last_refusal = f"{address} was refused: {error}"
            sys.stderr.write(f"rendezvous: {self._last_refusal}\n")
            connection.close()
            return
        except _Incompatible as error:
            connection.close()
            with self._changed:
                self._mismatch = str(error)
                self._changed.notify_all()
            return
        finally:
            self._callers -= 1
        self._attend(follower)

    def _admit(self, connection: TlsConnection) -> Joined:
        handshake = LeaderHandshake(self._identity, self._leader.followers, self._certificate.binding)
        send_line(connection, handshake.challenge)
        decision = handshake.decide(receive_line(connection), self._why_taken, taken_for_good=True)
        send_line(connection, decision.reply)
        if decision.joined is None:
            raise (_Incompatible if decision.incompatible else HandshakeFailed)(decision.reason)
        return decision.joined

    def _add(self, connection: TlsConnection, joined: Joined) -> _Follower:
        connection.lift_limit()
        follower = _Follower(joined, Channel(connection))
        with self._changed:
            reason = self._why_taken(joined.rank)
            if reason:
                raise HandshakeFailed(reason)
            self._followers[joined.rank] = follower
            self._changed.notify_all()
        sys.stderr.write(f"rendezvous: {joined} joined\n")
        return follower

    def _why_taken(self, rank: int) -> str:
        taken = self._followers.get(rank)
        return "" if taken is None else f"too late: {taken.joined} is in the cell already"

    def _who_is_missing(self) -> str:
        missing = sorted(set(range(1, self._leader.size)) - set(self._followers))
        ranks = ", ".join(map(str, missing))
        after = f"; {self._last_refusal}" if self._last_refusal else ""
        return f"no follower of rank {ranks} joined within {self._leader.join_timeout_s:g} s{after}"

    # --- from then on -----------------------------------------------------------------------------------------------

    def _attend(self, follower: _Follower) -> None:
        try:
            while True:
                self._handle_message(follower, follower.channel.receive())
        except ChannelClosed as error:
            how = "is stopping" if follower.leaving else f"is gone: {error}"
            self._lost(f"{follower.joined} {how}")

    def _handle_message(self, follower: _Follower, message: Message) -> None:
        match message.kind:
            case Kind.BEAT:
                if self._hang_detector is not None:
                    done = PROGRESS.unpack(message.payload)[0]
                    self._hang_detector.note_beat(follower.joined.rank, done, monotonic())
            case Kind.REPLY:
                self._keep(follower, PROGRESS.unpack_from(message.payload)[0], message.payload[PROGRESS.size :])
            case Kind.LEAVING:
                follower.leaving = True
            case Kind.FAILED:
                self._lost(f"{follower.joined} failed: {message.payload.decode(errors='replace')}")
            case _:
                self._lost(f"{follower.joined} sent a {message.kind.name} message, which is the leader's to send")

    def _keep(self, follower: _Follower, number: int, returned: bytes) -> None:
        with self._changed:
            if number in follower.given_up:
                follower.given_up.remove(number)
                return
            follower.replies[number] = returned
            self._changed.notify_all()

    def _lost(self, reason: str) -> None:
        if not self._closing.is_set():
            self._end(reason)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            for follower in list(self._followers.values()):
                with contextlib.suppress(ChannelClosed):  # the reading thread reports it
                    follower.channel.beat()

    def _watch(self) -> None:
        """Separate from the heartbeats: sending one may wait for the member that hangs."""
        while not self._closing.wait(BEAT_S):
            if self._hang_detector is None:
                continue
            self._hang_detector.note_beat(0, self.finished(self._own_done), monotonic())
            reason = self._hang_detector.hang_reason(monotonic())
            if reason:
                self._lost(reason)
                return

    def _send_all(self, kind: Kind, payload: bytes = b"") -> None:
        for follower in list(self._followers.values()):
            with contextlib.suppress(ChannelClosed):  # the reading thread reports it
                follower.channel.send(kind, payload)

    @staticmethod
    def _thread(work: Callable[[], None], name: str) -> None:
        Thread(target=work, name=name, daemon=True).start()
