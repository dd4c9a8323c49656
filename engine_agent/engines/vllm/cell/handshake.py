"""How members of a cell prove themselves to each other before either believes a byte: one JSON line each way, then one.

Each side signs the other's fresh nonce together with everything that it claims (cell, generation, rank, node and
software), so that nothing can be replayed to another cell, generation, rank or connection. The secret never travels;
both derive from it a key for this connection alone. Nothing here is unpickled.
"""

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from engine_agent.engines.vllm.cell.member import Member
from engine_agent.protocol.fingerprint import BadFingerprint, Rank, checked_fingerprint, mismatch

MAX_LINE_BYTES = 32 * 1024
"""A fingerprint has at most 48 fields of 64 + 160 characters."""
HANDSHAKE_TIMEOUT_S = 5.0
_NONCE_BYTES = 16


class NotYet(Exception):
    """This attempt failed and another may not; the text says why."""


class Refused(Exception):
    """A member that proved itself does not want this one; the text says why, and trying again would not help."""


@dataclass(frozen=True)
class Joined:
    """Who is at the other end, and the key that proves it from now on."""

    rank: int
    node_id: str
    key: bytes

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node_id})"


Fingerprint = Mapping[str, str]
Taken = Callable[[int], str]
"""Why a rank is not free; empty: it is."""


def admit(connection: socket.socket, leader: Member, secret: bytes, own: Fingerprint, taken: Taken) -> Joined:
    """The leader's side: let one follower in.

    Raises:
        NotYet: whoever called did not prove itself, or asks for a place that it cannot have.
        Refused: it proved itself, and can be no member of this cell because its software differs.
    """
    challenge = {"cell": leader.cell, "generation": leader.generation, "nonce": secrets.token_hex(_NONCE_BYTES)}
    _send(connection, challenge)
    join = _receive(connection)
    proof = join.pop("proof", "")
    reason = _why_unproven(leader, challenge, join, str(proof), secret)
    if reason:
        _send(connection, {"refused": reason, "proof": ""})
        raise NotYet(reason)
    joined = Joined(int(join["rank"]), str(join["node"]), _sign(secret, "connection", challenge, join))
    reason = taken(joined.rank)
    if reason:
        raise NotYet(_refuse(connection, secret, challenge, join, reason))
    reason = mismatch(Rank(0, leader.node_id, own), Rank(joined.rank, joined.node_id, _fingerprint(join)))
    if reason:
        raise Refused(_refuse(connection, secret, challenge, join, reason))
    _send(connection, {"proof": _sign(secret, "welcome", challenge, join).hex()})
    return joined


def introduce(connection: socket.socket, follower: Member, secret: bytes, own: Fingerprint) -> Joined:
    """The follower's side: be let in, and know that it is the leader who did it.

    Raises:
        NotYet: what answers is not the leader of this generation, or not yet.
        Refused: the leader does not want this member.
    """
    challenge = _receive(connection)
    if challenge.get("cell") != follower.cell or challenge.get("generation") != follower.generation:
        found = f"cell {challenge.get('cell')} generation {challenge.get('generation')}"
        raise NotYet(f"what answers there leads {found}, not cell {follower.cell} generation {follower.generation}")
    join = {
        "cell": follower.cell,
        "generation": follower.generation,
        "rank": follower.rank,
        "node": follower.node_id,
        "fingerprint": json.dumps(dict(own)),
        "nonce": secrets.token_hex(_NONCE_BYTES),
    }
    _send(connection, {**join, "proof": _sign(secret, "join", challenge, join).hex()})
    answer = _receive(connection)
    proof, refused = str(answer.get("proof", "")), str(answer.get("refused", ""))
    if refused:
        if _is_proof(proof, _sign(secret, "refusal", challenge, {**join, "refused": refused})):
            raise Refused(refused)
        raise NotYet(f"refused: {refused}")
    if not _is_proof(proof, _sign(secret, "welcome", challenge, join)):
        raise NotYet("what listens there does not prove that it knows the cell's secret")
    return Joined(0, "the leader", _sign(secret, "connection", challenge, join))


def derived_key(secret: bytes, purpose: str, *context: object) -> bytes:
    """A key for one purpose, 32 bytes."""
    return hmac.new(secret, json.dumps([purpose, *map(str, context)]).encode(), hashlib.sha256).digest()


def _why_unproven(leader: Member, challenge: dict[str, Any], join: dict[str, Any], proof: str, secret: bytes) -> str:
    rank, node = join.get("rank"), join.get("node")
    if (join.get("cell"), join.get("generation")) != (leader.cell, leader.generation):
        here = f"cell {leader.cell} generation {leader.generation}"
        return f"this is {here}, not cell {join.get('cell')} generation {join.get('generation')}"
    if not _is_proof(proof, _sign(secret, "join", challenge, join)):
        return f"node {node} does not prove that it knows the secret of cell {leader.cell}"
    if not isinstance(rank, int) or not 1 <= rank <= leader.followers:
        return f"rank {rank} is not 1 to {leader.followers}"
    return ""


def _fingerprint(join: dict[str, Any]) -> dict[str, str]:
    try:
        return checked_fingerprint(str(join.get("fingerprint")), f"the fingerprint of rank {join['rank']}")
    except BadFingerprint as error:
        raise NotYet(str(error)) from error


def _refuse(
    connection: socket.socket, secret: bytes, challenge: dict[str, Any], join: dict[str, Any], reason: str
) -> str:
    proof = _sign(secret, "refusal", challenge, {**join, "refused": reason})
    _send(connection, {"refused": reason, "proof": proof.hex()})
    return reason


def _sign(secret: bytes, what: str, challenge: dict[str, Any], claims: dict[str, Any]) -> bytes:
    return derived_key(secret, what, *(json.dumps(said, sort_keys=True) for said in (challenge, claims)))


def _is_proof(given: str, expected: bytes) -> bool:
    return hmac.compare_digest(given.encode(), expected.hex().encode())


def _send(connection: socket.socket, line: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise NotYet(f"the handshake broke off: {error}") from error


def _receive(connection: socket.socket) -> dict[str, Any]:
    received = bytearray()
    ends_at = monotonic() + HANDSHAKE_TIMEOUT_S
    try:
        while not received.endswith(b"\n"):
            connection.settimeout(max(0.001, ends_at - monotonic()))
            part = connection.recv(1)  # what follows the line belongs to the channel
            if not part or len(received) >= MAX_LINE_BYTES:
                raise NotYet("the handshake broke off" if not part else f"a line longer than {MAX_LINE_BYTES} bytes")
            received += part
        line = json.loads(received)
    except OSError as error:
        raise NotYet(f"the handshake broke off: {error}") from error
    except ValueError as error:
        raise NotYet(f"what answers there speaks another protocol: {error}") from error
    if not isinstance(line, dict):
        raise NotYet("what answers there speaks another protocol")
    return line
