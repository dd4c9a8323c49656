"""Checks of the links between nodes of a future cell: every pair connects, at what speed, and all compute the same sum.

Each member listens on the rendezvous port of its engine and connects to members of lower rank. Both sides prove that
they know the check's secret before anything else is read. Then all pairs, one after the other in the same order on all
ranks, send some MiB each way. Finally all ranks exchange vectors of whole numbers and must get the same sum. Only the
standard library; one deadline for everything. The data is random."""

import hashlib
import hmac
import random
import secrets
import socket
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

from engine_agent.node.checks.result import Result
from engine_agent.protocol.strict_json import strict_loads

MIB = 1024 * 1024
NONCE_BYTES = 32
PROOF_BYTES = 32
RETRY_S = 0.2
VECTOR = 4096
SLOW_SHARE = 0.25
"""Of the fastest link of the cell: a slower link delays every step of all members."""
LEAST_MIB_S = 1.0
MEMBERS_MOST = 32
_RANK = struct.Struct("<H")
_RECEIVED = b"\x06"


class LinkBroken(OSError):
    """A member is unreachable or answers wrongly; the text says which and why."""


@dataclass(frozen=True)
class LinkMember:
    rank: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.address}:{self.port})"


@dataclass(frozen=True)
class LinkPlan:
    """The plan of one member; equal on all members except for `rank`."""

    rank: int
    members: tuple[LinkMember, ...]
    secret: str
    mib: int = 32
    within_s: float = 60.0

    @property
    def own(self) -> LinkMember:
        """This member. Raises ValueError if it is not among the members, or their number is invalid."""
        if not 2 <= len(self.members) <= MEMBERS_MOST:
            raise ValueError(f"{len(self.members)} members; links are checked between 2 and {MEMBERS_MOST}")
        for member in self.members:
            if member.rank == self.rank:
                return member
        raise ValueError(f"rank {self.rank} is none of the members")


def plan_from(text: str) -> LinkPlan:
    """Parses a plan from JSON. Raises ValueError if it is invalid."""
    try:
        fields = strict_loads(text)
        members = tuple(LinkMember(**member) for member in fields.pop("members"))
        return LinkPlan(members=tuple(sorted(members, key=lambda member: member.rank)), **fields)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"invalid plan of links: {error}") from error


def check_links(plan: LinkPlan) -> tuple[Result, Result]:
    deadline_s = monotonic() + plan.within_s
    links: dict[int, socket.socket] = {}
    try:
        links = _connect_all(plan, deadline_s)
        speeds = _measure(plan, links, deadline_s)
        return _speed_result(plan, speeds), _sum(plan, links)
    except (OSError, ValueError) as error:
        links_result = Result("links", False, str(error), "every member reaches every other")
        return links_result, Result("collective", None, "not checked: not all members connected")
    finally:
        for link in links.values():
            link.close()


def _connect_all(plan: LinkPlan, deadline_s: float) -> dict[int, socket.socket]:
    own, links = plan.own, {}
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((own.address, own.port))
        listening.listen(MEMBERS_MOST)
        for member in plan.members:
            if member.rank < plan.rank:
                links[member.rank] = _connect(plan, member, deadline_s)
        missing = {member.rank for member in plan.members if member.rank > plan.rank}
        while missing:
            rank, link = _accept(plan, listening, missing, deadline_s)
            if rank in missing:
                missing.discard(rank)
                links[rank] = link
    return links


def _connect(plan: LinkPlan, member: LinkMember, deadline_s: float) -> socket.socket:
    reason = "no time was left"
    while monotonic() < deadline_s:
        try:
            link = socket.create_connection(
                (member.address, member.port), _seconds_left(deadline_s), (plan.own.address, 0)
            )
            try:
                return _proved(plan, link, member.rank, deadline_s)
            except OSError:
                link.close()
                raise
        except OSError as error:
            reason = error.strerror or str(error)
            sleep(min(RETRY_S, max(0.0, deadline_s - monotonic())))
    raise LinkBroken(f"{member} was not reached within {plan.within_s:g} s: {reason}")


def _proved(plan: LinkPlan, link: socket.socket, rank: int, deadline_s: float) -> socket.socket:
    link.settimeout(_seconds_left(deadline_s))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(NONCE_BYTES)
    link.sendall(_RANK.pack(plan.rank) + mine)
    theirs = _receive(link, NONCE_BYTES)
    link.sendall(_proof(plan, mine, theirs, plan.rank))
    if not hmac.compare_digest(_receive(link, PROOF_BYTES), _proof(plan, mine, theirs, rank)):
        raise LinkBroken(f"the peer that answers as rank {rank} does not know the secret of this check")
    return link


def _accept(
    plan: LinkPlan, listening: socket.socket, missing: set[int], deadline_s: float
) -> tuple[int, socket.socket]:
    """The next member that proves itself. Other connections are closed and do not affect the check."""
    while True:
        listening.settimeout(_seconds_left(deadline_s))
        try:
            link, _ = listening.accept()
        except TimeoutError:
            waiting = ", ".join(str(member) for member in plan.members if member.rank in missing)
            raise LinkBroken(f"{waiting} did not connect within {plan.within_s:g} s") from None
        try:
            link.settimeout(min(5.0, _seconds_left(deadline_s)))
            (rank,), theirs = _RANK.unpack(_receive(link, _RANK.size)), _receive(link, NONCE_BYTES)
            mine = secrets.token_bytes(NONCE_BYTES)
            link.sendall(mine)
            proof = _receive(link, PROOF_BYTES)
            if rank in missing and hmac.compare_digest(proof, _proof(plan, theirs, mine, rank)):
                link.sendall(_proof(plan, theirs, mine, plan.rank))
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return rank, link
        except OSError:
            pass
        link.close()


def _proof(plan: LinkPlan, first: bytes, second: bytes, rank: int) -> bytes:
    return hmac.digest(plan.secret.encode(), b"links" + first + second + _RANK.pack(rank), hashlib.sha256)


def _measure(plan: LinkPlan, links: Mapping[int, socket.socket], deadline_s: float) -> dict[int, tuple[float, float]]:
    """By rank: MiB/s to it, and from it. Each byte is compared."""
    noise = random.Random(plan.mib).randbytes(MIB)
    speeds: dict[int, tuple[float, float]] = {}
    for one, other in _pairs([member.rank for member in plan.members]):
        if plan.rank not in (one, other):
            continue
        peer = other if plan.rank == one else one
        link = links[peer]
        link.settimeout(_seconds_left(deadline_s))
        if plan.rank == one:
            sent = _send_noise(link, noise, plan.mib)
            speeds[peer] = (sent, _receive_noise(link, noise, plan.mib, peer))
        else:
            received = _receive_noise(link, noise, plan.mib, peer)
            speeds[peer] = (_send_noise(link, noise, plan.mib), received)
    return speeds


def _pairs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """All pairs, in the same order on all ranks. Pairs without a common member may run concurrently."""
    return ((one, other) for place, one in enumerate(ranks) for other in ranks[place + 1 :])


def _send_noise(link: socket.socket, noise: bytes, mib: int) -> float:
    began_s = monotonic()
    for _ in range(mib):
        link.sendall(noise)
    if _receive(link, 1) != _RECEIVED:
        raise LinkBroken("the other side received other data")
    return mib / max(monotonic() - began_s, 1e-6)


def _receive_noise(link: socket.socket, noise: bytes, mib: int, peer: int) -> float:
    began_s = monotonic()
    for number in range(mib):
        if _receive(link, MIB) != noise:
            raise LinkBroken(f"MiB {number} from rank {peer} is not what was sent")
    link.sendall(_RECEIVED)
    return mib / max(monotonic() - began_s, 1e-6)


def _speed_result(plan: LinkPlan, speeds: Mapping[int, tuple[float, float]]) -> Result:
    slowest_of = {rank: min(pair) for rank, pair in speeds.items()}
    fastest, (rank, slowest) = max(slowest_of.values()), min(slowest_of.items(), key=lambda item: item[1])
    numbers = {"slowest_mib_s": slowest, "fastest_mib_s": fastest, "links": float(len(speeds))}
    found = f"{len(speeds)} links of {slowest:.0f} to {fastest:.0f} MiB/s, the slowest with rank {rank}"
    if slowest < LEAST_MIB_S or slowest < SLOW_SHARE * fastest:
        wanted = f"at least {max(LEAST_MIB_S, SLOW_SHARE * fastest):.0f} MiB/s, a quarter of this node's fastest link"
        return Result("links", False, found, wanted, numbers=numbers)
    return Result("links", True, found, numbers=numbers)


def _sum(plan: LinkPlan, links: Mapping[int, socket.socket]) -> Result:
    """All ranks add up the same whole numbers and compare the results."""
    own = _numbers(plan.rank)
    total = array("q", own)
    for rank in sorted(links):
        theirs = _exchange(plan, links[rank], rank, own.tobytes())
        for place, value in enumerate(array("q", theirs)):
            total[place] += value
    digest = hashlib.sha256(total.tobytes()).digest()
    wrong = [rank for rank in sorted(links) if _exchange(plan, links[rank], rank, digest) != digest]
    expected = [sum(values) for values in zip(*(_numbers(member.rank) for member in plan.members), strict=True)]
    wanted = "all members get the sum of all vectors"
    if total.tolist() != expected:
        return Result("collective", False, "this node computed a wrong sum", wanted)
    if wrong:
        return Result("collective", False, f"rank {wrong[0]} got another sum", wanted)
    return Result("collective", True, f"{len(plan.members)} members added up {VECTOR} numbers to the same sum")


def _numbers(rank: int) -> "array[int]":
    draw = random.Random(rank)
    return array("q", (draw.randrange(1 << 40) for _ in range(VECTOR)))


def _exchange(plan: LinkPlan, link: socket.socket, rank: int, content: bytes) -> bytes:
    """The lower rank sends first, so that neither waits for the other to read."""
    if plan.rank < rank:
        link.sendall(content)
        return _receive(link, len(content))
    theirs = _receive(link, len(content))
    link.sendall(content)
    return theirs


def _receive(link: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = link.recv(min(length - len(parts), MIB))
        if not part:
            raise LinkBroken("the other side closed the connection")
        parts += part
    return bytes(parts)


def _seconds_left(deadline_s: float) -> float:
    return max(0.01, deadline_s - monotonic())
