"""Members of a cell for tests, and sockets between them."""

from dataclasses import replace
from pathlib import Path

from engine_agent.engines.handshake import leader_certificate
from engine_agent.engines.vllm.cell.member import Member
from engine_agent.node.identity import throwaway_certificate

SECRET = b"the secret of c-1, generation 3"
CERTIFICATE = leader_certificate(throwaway_certificate())
LIMIT_S = 60.0
"""For what takes milliseconds unless it never comes."""


def leader(port: int = 0, *, followers: int = 1, hang_s: float = 60.0, join_timeout_s: float = LIMIT_S) -> Member:
    """Rank 0, on loopback."""
    return Member(
        cell="c-1",
        generation=3,
        rank=0,
        followers=followers,
        node_id="n-00000000",
        address="127.0.0.1",
        leader_address="127.0.0.1",
        leader_port=port,
        runtime=str(Path("/nowhere")),
        hang_s=hang_s,
        join_timeout_s=join_timeout_s,
    )


def follower(of: Member, rank: int = 1) -> Member:
    return replace(of, rank=rank, node_id=f"n-0000000{rank}")
