"""Mutual authentication of the members of a cell: the leader's challenge, the follower's join, the leader's reply, one
JSON line each, inside TLS 1.3.

Each side signs the other's fresh nonce together with all it states (cell, generation, rank, node, software) and with
the certificate of the TLS connection (`tls-server-end-point` of RFC 5929). So no line can be replayed to another cell,
generation, rank or connection. Followers accept any certificate: the leader's agent makes one for each start, and the
signed handshake proves it. The secret is never sent. Leaders and followers of every engine transport the lines
themselves, with asyncio or threads. Imports only the standard library, because engines have their own environments."""

import hashlib
import hmac
import json
import os
import random
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_agent.protocol.fingerprint import BadFingerprint, Fingerprint, Rank, checked_fingerprint, mismatch

MAX_LINE_BYTES = 32 * 1024
"""A fingerprint has at most 48 fields of 64 + 160 characters."""
_NONCE_BYTES = 16
_RETRY_FIRST_S = 0.1
_RETRY_LONGEST_S = 1.0


class HandshakeFailed(Exception):
    """This attempt failed and another may succeed; the text states the cause."""


class MembershipRefused(Exception):
    """An authenticated leader rejects this member permanently; the text states the cause."""


@dataclass(frozen=True)
class Identity:
    """What a member states in the handshake, and the secret that proves it."""

    cell: str
    generation: int
    rank: int
    node_id: str
    fingerprint: Fingerprint
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Joined:
    """A follower that has authenticated; its connection now belongs to it."""

    rank: int
    node_id: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node_id})"


@dataclass(frozen=True)
class Decision:
    """The leader's decision: the reply to the follower, and either the follower that joined or the reason.
    `incompatible`: the follower is a member of this cell, but its software differs, so the cell cannot form."""

    reply: bytes
    joined: Joined | None = None
    reason: str = ""
    incompatible: bool = False


WhyTaken = Callable[[int], str]
"""Why a rank is unavailable; empty if it is free."""


class LeaderHandshake:
    """The leader's side of one connection: send `challenge`, pass the answer to `decide`, send its reply."""

    def __init__(self, leader: Identity, followers: int, binding: bytes) -> None:
        """`binding` is `binding_of` the leader's certificate."""
        self._leader = leader
        self._binding = binding
        self._followers = followers
        nonce = secrets.token_hex(_NONCE_BYTES)
        self._challenge = {"cell": leader.cell, "generation": leader.generation, "nonce": nonce}

    @property
    def challenge(self) -> bytes:
        return _line(self._challenge)

    def decide(self, line: bytes, why_taken: WhyTaken, *, taken_for_good: bool) -> Decision:
        """Admits or rejects the follower. `taken_for_good`: a follower whose rank is taken need not retry. Raises
        HandshakeFailed if the line is not a join; there is nothing to reply."""
        join = _fields(line)
        proof = str(join.pop("proof", ""))
        reason = self._why_unproven(join, proof)
        if reason:
            return Decision(_line({"refused": reason, "proof": ""}), reason=reason)
        joined = Joined(int(join["rank"]), str(join["node"]))
        reason = why_taken(joined.rank)
        if reason:
            return Decision(self._refusal(join, reason, for_good=taken_for_good), reason=reason)
        reason = self._mismatch(joined, join)
        if reason:
            return Decision(self._refusal(join, reason, for_good=True), reason=reason, incompatible=True)
        return Decision(_line({"proof": self._sign("welcome", join).hex()}), joined)

    def _why_unproven(self, join: Mapping[str, Any], proof: str) -> str:
        leader, rank = self._leader, join.get("rank")
        if (join.get("cell"), join.get("generation")) != (leader.cell, leader.generation):
            this = f"cell {leader.cell} generation {leader.generation}"
            return f"this is {this}, not cell {join.get('cell')} generation {join.get('generation')}"
        if not _is_proof(proof, self._sign("join", join)):
            return f"node {join.get('node')} does not prove that it knows the secret of cell {leader.cell}"
        if not isinstance(rank, int) or not 1 <= rank <= self._followers:
            return f"rank {rank} is not 1 to {self._followers}"
        return ""

    def _mismatch(self, joined: Joined, join: Mapping[str, Any]) -> str:
        try:
            theirs = checked_fingerprint(str(join.get("fingerprint")), f"the fingerprint of rank {joined.rank}")
        except BadFingerprint as error:
            raise HandshakeFailed(str(error)) from error
        own = Rank(self._leader.rank, self._leader.node_id, self._leader.fingerprint)
        return mismatch(own, Rank(joined.rank, joined.node_id, theirs))

    def _refusal(self, join: Mapping[str, Any], reason: str, *, for_good: bool) -> bytes:
        """A refusal that makes the follower stop carries a proof; without one it retries."""
        proof = self._sign("refusal", {**join, "refused": reason}).hex() if for_good else ""
        return _line({"refused": reason, "proof": proof})

    def _sign(self, purpose: str, stated: Mapping[str, Any]) -> bytes:
        return _sign(self._leader.secret, purpose, self._binding, self._challenge, stated)


class FollowerHandshake:
    """The follower's side of one connection: answer the challenge with `join`, then `confirm` the leader's reply."""

    def __init__(self, follower: Identity, binding: bytes) -> None:
        """`binding` is `binding_of` the certificate that this connection's server presented."""
        self._follower = follower
        self._binding = binding
        self._challenge: dict[str, Any] = {}
        self._join: dict[str, Any] = {}

    def join(self, challenge: bytes) -> bytes:
        """Returns the answer to the leader's challenge. Raises HandshakeFailed if it is not a challenge, or it is one
        of another cell or generation."""
        follower, received = self._follower, _fields(challenge)
        if (received.get("cell"), received.get("generation")) != (follower.cell, follower.generation):
            other = f"cell {received.get('cell')} generation {received.get('generation')}"
            raise HandshakeFailed(
                f"the server leads {other}, not cell {follower.cell} generation {follower.generation}"
            )
        self._challenge = received
        self._join = {
            "cell": follower.cell,
            "generation": follower.generation,
            "rank": follower.rank,
            "node": follower.node_id,
            "fingerprint": json.dumps(dict(follower.fingerprint)),
            "nonce": secrets.token_hex(_NONCE_BYTES),
        }
        return _line({**self._join, "proof": self._sign("join", self._join).hex()})

    def confirm(self, reply: bytes) -> None:
        """Returns once the leader has admitted this member. Raises HandshakeFailed if the server does not prove that it
        is the leader, or it lets this member retry. Raises MembershipRefused if the leader rejects this member
        permanently."""
        received = _fields(reply)
        proof, refused = str(received.get("proof", "")), str(received.get("refused", ""))
        if refused:
            if _is_proof(proof, self._sign("refusal", {**self._join, "refused": refused})):
                raise MembershipRefused(refused)
            raise HandshakeFailed(f"refused: {refused}")
        if not _is_proof(proof, self._sign("welcome", self._join)):
            raise HandshakeFailed("the server does not prove that it knows the cell's secret")

    def _sign(self, purpose: str, stated: Mapping[str, Any]) -> bytes:
        return _sign(self._follower.secret, purpose, self._binding, self._challenge, stated)


def retry_pauses_s() -> Iterator[float]:
    """Yields the seconds between a follower's attempts: increasing, with jitter."""
    pause_s = _RETRY_FIRST_S
    while True:
        yield pause_s * random.uniform(0.8, 1.2)
        pause_s = min(pause_s * 2, _RETRY_LONGEST_S)


def derived_key(secret: bytes, purpose: str, *context: object) -> bytes:
    """Returns a key for one purpose, 32 bytes: HMAC-SHA256 over purpose and context."""
    return hmac.new(secret, json.dumps([purpose, *map(str, context)]).encode(), hashlib.sha256).digest()


def _sign(
    secret: bytes, purpose: str, binding: bytes, challenge: Mapping[str, Any], stated: Mapping[str, Any]
) -> bytes:
    signed = (json.dumps(each, sort_keys=True) for each in (challenge, stated))
    return derived_key(secret, purpose, binding.hex(), *signed)


def _is_proof(given: str, expected: bytes) -> bool:
    return hmac.compare_digest(given.encode(errors="backslashreplace"), expected.hex().encode())


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise HandshakeFailed(f"the server speaks another protocol: {error}") from error
    if not isinstance(fields, dict):
        raise HandshakeFailed("the server speaks another protocol")
    return fields


_END_OF_CERTIFICATE = "-----END CERTIFICATE-----"


class BadCertificate(ValueError):
    """The leader's certificate or key is malformed; the text states how."""


@dataclass(frozen=True)
class LeaderCertificate:
    """A leader's TLS context, and the `binding` that the handshake signs."""

    context: ssl.SSLContext = field(repr=False)
    binding: bytes


def leader_certificate(pem: str) -> LeaderCertificate:
    """Loads certificate and key, PEM, in this order. Raises BadCertificate if it is malformed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session is resumed: a lost member ends the cell
    certificate, end, _ = pem.partition(_END_OF_CERTIFICATE)
    try:
        _load(context, pem)
        return LeaderCertificate(context, binding_of(ssl.PEM_cert_to_DER_cert(certificate + end)))
    except (OSError, ValueError) as error:
        raise BadCertificate(f"holds no certificate and its key as PEM: {error}") from error


def follower_context() -> ssl.SSLContext:
    """Accepts any certificate; the handshake authenticates the leader."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def binding_of(certificate: bytes | None) -> bytes:
    """Binds a handshake to the server's certificate, given as DER: its SHA-256 (RFC 5929, section 4.1)."""
    return hashlib.sha256(certificate or b"").digest()


def without_tls(error: ssl.SSLError) -> str:
    why = (error.reason or error.strerror or str(error)).lower().replace("_", " ")
    return f"the server does not speak TLS 1.3 ({why})"


def _load(context: ssl.SSLContext, pem: str) -> None:
    """`ssl` reads keys only from files; this one is in memory, where no other process can open it."""
    descriptor = os.memfd_create("cell-certificate")
    try:
        os.write(descriptor, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
