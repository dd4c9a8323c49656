"""Checks between nodes that are to be one cell: every pair reaches each other, how fast, and whether they add up alike.

Each member listens on the port of its node that its engine's rendezvous would use, and connects to those of a lower
rank. Both sides prove that they know the check's secret before anything else is read. Then, pair by pair in an order
that all ranks keep (so that no two measure over one link at once), some MiB go each way; at last all ranks send all
others a vector of whole numbers and must get the same sum. Only the standard library; bounded by one deadline. What
goes over the links is noise.
"""

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
"""Of the fastest link of the cell: a link that is slower than this holds all others back in every step."""
LEAST_MIB_S = 1.0
MEMBERS_MOST = 32
_RANK = struct.Struct("<H")
_TAKEN = b"\x06"


class LinkBroken(OSError):
    """A member cannot be reached, or does not answer as it must; the text says which and why."""


@dataclass(frozen=True)
class LinkMember:
    """One member to be: where its check listens."""

    rank: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.address}:{self.port})"


@dataclass(frozen=True)
class LinkPlan:
    """A check of links as one member is told it; the same on all but for `rank`."""

    rank: int
    members: tuple[LinkMember, ...]
    secret: str
    mib: int = 32
    within_s: float = 60.0

    @property
    def own(self) -> LinkMember:
        """This member.

        Raises:
            ValueError: it is not among the members, or they are too many.
        """
        if not 2 <= len(self.members) <= MEMBERS_MOST:
            raise ValueError(f"{len(self.members)} members; links are checked between 2 and {MEMBERS_MOST}")
        for member in self.members:
            if member.rank == self.rank:
                return member
        raise ValueError(f"rank {self.rank} is none of the members")


def plan_from(text: str) -> LinkPlan:
    """A plan as JSON.

    Raises:
        ValueError: it is none.
    """
    try:
        fields = strict_loads(text)
        members = tuple(LinkMember(**member) for member in fields.pop("members"))
        return LinkPlan(members=tuple(sorted(members, key=lambda member: member.rank)), **fields)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"no plan of links: {error}") from error


def check_links(plan: LinkPlan) -> tuple[Result, Result]:
    """The links of this member, and the sum of all."""
    deadline_s = monotonic() + plan.within_s
    links: dict[int, socket.socket] = {}
    try:
        links = _meet(plan, deadline_s)
        speeds = _measure(plan, links, deadline_s)
        return _judge(plan, speeds), _sum(plan, links)
    except (OSError, ValueError) as error:
        links_result = Result("links", False, str(error), "every member reaches every other")
        return links_result, Result("collective", None, "not tried: the members did not all meet")
    finally:
        for link in links.values():
            link.close()


def _meet(plan: LinkPlan, deadline_s: float) -> dict[int, socket.socket]:
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
            link = socket.create_connection((member.address, member.port), _left(deadline_s), (plan.own.address, 0))
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
    """Say who we are, prove it, and believe the other one once it has proved itself."""
    link.settimeout(_left(deadline_s))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = secrets.token_bytes(NONCE_BYTES)
    link.sendall(_RANK.pack(plan.rank) + mine)
    theirs = _receive(link, NONCE_BYTES)
    link.sendall(_proof(plan, mine, theirs, plan.rank))
    if not hmac.compare_digest(_receive(link, PROOF_BYTES), _proof(plan, mine, theirs, rank)):
        raise LinkBroken(f"what answers as rank {rank} does not know the secret of this check")
    return link


def _accept(
    plan: LinkPlan, listening: socket.socket, missing: set[int], deadline_s: float
) -> tuple[int, socket.socket]:
    """The next member that proves itself; whoever does not is hung up on, and costs nobody the check."""
    while True:
        listening.settimeout(_left(deadline_s))
        try:
            link, _ = listening.accept()
        except TimeoutError:
            waiting = ", ".join(str(member) for member in plan.members if member.rank in missing)
            raise LinkBroken(f"{waiting} did not come within {plan.within_s:g} s") from None
        try:
            link.settimeout(min(5.0, _left(deadline_s)))
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
    """By rank: MiB/s to it, and from it. Each byte is compared with what was sent."""
    noise = random.Random(plan.mib).randbytes(MIB)
    speeds: dict[int, tuple[float, float]] = {}
    for one, other in _pairs([member.rank for member in plan.members]):
        if plan.rank not in (one, other):
            continue
        peer = other if plan.rank == one else one
        link = links[peer]
        link.settimeout(_left(deadline_s))
        if plan.rank == one:
            sent = _send_noise(link, noise, plan.mib)
            speeds[peer] = (sent, _take_noise(link, noise, plan.mib, peer))
        else:
            taken = _take_noise(link, noise, plan.mib, peer)
            speeds[peer] = (_send_noise(link, noise, plan.mib), taken)
    return speeds


def _pairs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """All pairs, in one order on all ranks. Pairs without a common member may go at once."""
    return ((one, other) for place, one in enumerate(ranks) for other in ranks[place + 1 :])


def _send_noise(link: socket.socket, noise: bytes, mib: int) -> float:
    began_s = monotonic()
    for _ in range(mib):
        link.sendall(noise)
    if _receive(link, 1) != _TAKEN:
        raise LinkBroken("what was sent came otherwise")
    return mib / max(monotonic() - began_s, 1e-6)


def _take_noise(link: socket.socket, noise: bytes, mib: int, peer: int) -> float:
    began_s = monotonic()
    for number in range(mib):
        if _receive(link, MIB) != noise:
            raise LinkBroken(f"MiB {number} from rank {peer} is not what was sent")
    link.sendall(_TAKEN)
    return mib / max(monotonic() - began_s, 1e-6)


def _judge(plan: LinkPlan, speeds: Mapping[int, tuple[float, float]]) -> Result:
    slowest_of = {rank: min(pair) for rank, pair in speeds.items()}
    fastest, (rank, slowest) = max(slowest_of.values()), min(slowest_of.items(), key=lambda item: item[1])
    numbers = {"slowest_mib_s": slowest, "fastest_mib_s": fastest, "links": float(len(speeds))}
    found = f"{len(speeds)} links of {slowest:.0f} to {fastest:.0f} MiB/s, the slowest with rank {rank}"
    if slowest < LEAST_MIB_S or slowest < SLOW_SHARE * fastest:
        wanted = f"at least {max(LEAST_MIB_S, SLOW_SHARE * fastest):.0f} MiB/s, a quarter of this node's fastest link"
        return Result("links", False, found, wanted, numbers=numbers)
    return Result("links", True, found, numbers=numbers)


def _sum(plan: LinkPlan, links: Mapping[int, socket.socket]) -> Result:
    """All ranks add up the same whole numbers, and tell each other what they got."""
    own = _numbers(plan.rank)
    total = array("q", own)
    for rank in sorted(links):
        theirs = _exchange(plan, links[rank], rank, own.tobytes())
        for place, value in enumerate(array("q", theirs)):
            total[place] += value
    digest = hashlib.sha256(total.tobytes()).digest()
    wrong = [rank for rank in sorted(links) if _exchange(plan, links[rank], rank, digest) != digest]
    expected = [sum(values) for values in zip(*(_numbers(member.rank) for member in plan.members), strict=True)]
    wanted = "all members get the sum of what all gave"
    if total.tolist() != expected:
        return Result("collective", False, "the sum over the members is wrong here", wanted)
    if wrong:
        return Result("collective", False, f"rank {wrong[0]} got another sum", wanted)
    return Result("collective", True, f"{len(plan.members)} members added up {VECTOR} numbers alike")


def _numbers(rank: int) -> "array[int]":
    draw = random.Random(rank)
    return array("q", (draw.randrange(1 << 40) for _ in range(VECTOR)))


def _exchange(plan: LinkPlan, link: socket.socket, rank: int, content: bytes) -> bytes:
    """The lower rank speaks first, so that neither waits for the other to read."""
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
            raise LinkBroken("the other side hung up")
        parts += part
    return bytes(parts)


def _left(deadline_s: float) -> float:
    return max(0.01, deadline_s - monotonic())
