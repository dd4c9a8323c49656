"""What a node knows, for tests of engine adapters."""

from pathlib import Path

from engine_agent.engines.base import EngineContext
from engine_agent.protocol.messages import Peer

PORT_BASE = 34000


def context(**engine_pythons: str) -> EngineContext:
    """A node at 127.0.0.1 with these engine environments."""
    return EngineContext(
        node_id="n-00000001",
        home=Path("/home/node"),
        host="127.0.0.1",
        port_base=PORT_BASE,
        repo_root=Path("/code"),
        engine_pythons={engine: Path(python) for engine, python in engine_pythons.items()},
        cache=Path("/cache/fetched"),
    )


def peer(rank: int) -> Peer:
    """A member of the cell, whose ports begin 100 further for every rank."""
    return Peer(node=f"n-0000000{rank + 1}", rank=rank, address=f"10.0.0.{rank + 1}", port_base=PORT_BASE + 100 * rank)
