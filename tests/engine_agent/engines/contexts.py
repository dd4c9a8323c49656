"""Nodes, their orders, and the orders that engines of one node refuse, for tests of engine adapters."""

from pathlib import Path
from typing import Any

import msgspec

from engine_agent.engines.base import EngineContext
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer, PlanAdapter
from engine_agent.protocol.states import MemberRole, Phase

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


def leader_order(plan: EnginePlan, *peers: Peer, **changes: Any) -> Assignment:
    """The order of rank 0, in a cell of one node unless `peers` say otherwise. `changes` are members of the plan."""
    return Assignment(
        cell="c-1",
        generation=3,
        rank=0,
        role=MemberRole.LEADER,
        phase=Phase.SERVE,
        secret="s",
        peers=peers or (peer(0),),
        plan=msgspec.structs.replace(plan, **changes),
    )


def not_plain(plan: EnginePlan) -> list[tuple[Assignment, str]]:
    """Orders that an engine refuses that serves one model on one node, each with a part of the reason."""
    return [
        (leader_order(plan, peer(0), peer(1)), "runs on one node; this cell has several"),
        (
            leader_order(plan, adapters=(PlanAdapter("fine", None),)),
            "a model as it is, and the plan has the adapter fine",
        ),
        (leader_order(plan, draft=Artifact("file:///srv/draft", "sha256:1")), "a draft model"),
        (leader_order(plan, artifact=None), "names no artifact"),
    ]
