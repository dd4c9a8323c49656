"""A connection between every two ranks of a cell, for what their workers exchange in each layer of a step.

It carries bytes and knows no tensor and no vLLM. Each message is a frame: its number on this connection and its length,
so that ranks out of step end with a sentence, never with wrong numbers. Who connects proves that it knows what the
members of this start know; frames themselves travel in plain, as all collectives do (ADR 0018).
"""

import hmac
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

_FRAME = struct.Struct("<IQ")
_BUFFER_BYTES = 212_992
"""What Linux grants without being asked for more (`net.core.rmem_max`); the kernel keeps twice as much."""
FRAME_LIMIT_BYTES = 64 * 1024
"""The longest message that every rank may send before it reads: a rank can be one message ahead of another, and two of
them fit into the buffers of a connection, so nobody waits for ever to be read."""
_STRANGER_S = 10.0
"""How long one who connects may take to prove itself."""
SILENCE_S = 300
"""How long a rank waits for another one's part; the hang detector of the cell judges long before."""

Proof = Callable[[int, int], bytes]
"""What a rank shows to another: 32 bytes that depend on both, in this order."""


class OutOfStep(RuntimeError):
    """A rank has ended, or is not where this one is; the text says which and why."""


@dataclass
class Connection:
    """One peer: how many messages went to it and came from it."""

    rank: int
    socket: socket.socket
    sent: int = 0
    received: int = 0

    def send(self, content: memoryview) -> None:
        """Send one message whole.

        Raises:
            OutOfStep: the peer has gone, or takes nothing.
        """
        self.sent += 1
        parts = [memoryview(_FRAME.pack(self.sent & 0xFFFFFFFF, len(content))), content]
        try:
            gone = self.socket.sendmsg(parts)
            if gone < _FRAME.size:
                self.socket.sendall(parts[0][gone:])
                gone = _FRAME.size
            self.socket.sendall(content[gone - _FRAME.size :])
        except OSError as error:
            raise OutOfStep(f"rank {self.rank} takes nothing: {error}") from error

    def receive_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, bytes, with the next message, which must be as long.

        Raises:
            OutOfStep: the peer has gone, is silent, or sent another message than the one that is due.
        """
        self.received += 1
        head = bytearray(_FRAME.size)
        parts = [memoryview(head), buffer]
        while any(len(part) for part in parts):
            try:
                count = self.socket.recvmsg_into(parts)[0]
            except OSError as error:
                raise OutOfStep(f"rank {self.rank} sends nothing: {error}") from error
            if not count:
                raise OutOfStep(f"rank {self.rank} has ended")
            of_head = min(count, len(parts[0]))
            parts = [parts[0][of_head:], parts[1][count - of_head :]]
            if not len(parts[0]):
                number, length = _FRAME.unpack(head)
                self._check_due(number, length, len(buffer))

    def _check_due(self, number: int, length: int, wanted: int) -> None:
        due = self.received & 0xFFFFFFFF
        if (number, length) != (due, wanted):
            raise OutOfStep(
                f"rank {self.rank} sent message {number} of {length} bytes where {due} of {wanted} bytes was due"
            )


def meet(
    *,
    rank: int,
    size: int,
    address: str,
    proof: Proof,
    publish: Callable[[int, str], None],
    where_is: Callable[[int], str],
    within_s: float,
) -> Mapping[int, Connection]:
    """Connect to all lower ranks and be connected to by all higher ones; the connections by rank.

    `publish` tells the others where this rank listens, `where_is` waits until another one has told.

    Raises:
        OutOfStep: not all came in time, or somebody else answers in a rank's place.
        OSError: `address` is none of this host's.
    """
    deadline_s = monotonic() + within_s
    with socket.create_server((address, 0), backlog=size) as listener:
        publish(rank, f"{address}:{listener.getsockname()[1]}")
        met = {lower: _connect(rank, lower, where_is(lower), proof, within_s) for lower in range(rank)}
        while len(met) < size - 1:
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                missing = sorted(set(range(size)) - set(met) - {rank})
                raise OutOfStep(f"ranks {missing} did not connect within {within_s:.0f} s")
            listener.settimeout(left_s)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                continue
            higher = _let_in(rank, size, accepted, proof)
            if higher is None or higher in met:
                accepted.close()
            else:
                met[higher] = _ready(higher, accepted)
    return met


def _connect(rank: int, peer: int, place: str, proof: Proof, within_s: float) -> Connection:
    host, _, port = place.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=within_s)
        connection.sendall(struct.pack("<I", rank) + proof(rank, peer))
        answer = _read(connection, len(proof(peer, rank)))
    except OSError as error:
        raise OutOfStep(f"rank {peer} cannot be reached at {place}: {error}") from error
    if not hmac.compare_digest(answer, proof(peer, rank)):
        connection.close()
        raise OutOfStep(f"what answers at {place} does not prove that it is rank {peer}")
    return _ready(peer, connection)


def _let_in(rank: int, size: int, accepted: socket.socket, proof: Proof) -> int | None:
    """The rank that connected; None for anybody else."""
    accepted.settimeout(_STRANGER_S)
    try:
        (claimed,) = struct.unpack("<I", _read(accepted, 4))
        if not rank < claimed < size:
            return None
        wanted = proof(claimed, rank)
        if not hmac.compare_digest(_read(accepted, len(wanted)), wanted):
            return None
        accepted.sendall(proof(rank, claimed))
    except OSError:
        return None
    return int(claimed)


def _read(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise ConnectionResetError("it closed the connection")
        content += part
    return content


def _ready(rank: int, connected: socket.socket) -> Connection:
    """Blocking, without Python's own timeout, which would cost a `poll` for each read."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        connected.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
    for silence in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, silence, struct.pack("ll", SILENCE_S, 0))
    return Connection(rank, connected)
