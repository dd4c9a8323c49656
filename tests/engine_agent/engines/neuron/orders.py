"""Assignments of a Neuron cell, with the plan as the control plane renders it."""

import json
from pathlib import Path
from typing import Any

from engine_agent.engines.base import EngineContext
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from engine_agent.protocol.states import MemberRole, Phase

PORT_BASE = 9400
ARTIFACT = Artifact("s3://models/llama-70b/3", "sha256:" + "0123456789abcdef" * 4)
DRAFT = Artifact("s3://models/llama-70b-eagle", "sha256:" + "fedcba9876543210" * 4)


def node(rank: int) -> EngineContext:
    return EngineContext(
        node_id=f"n-0000000{rank}",
        home=Path("/var/lib/switchyard"),
        host=f"10.0.0.{rank}",
        port_base=PORT_BASE,
        repo_root=Path("/code"),
        engine_pythons={"neuron": Path("/cache/engines/neuron/bin/python")},
        cache=Path("/cache/fetched"),
    )


def neuron_args(override: dict[str, Any], *more: str) -> tuple[str, ...]:
    config = json.dumps({"override_neuron_config": override}, sort_keys=True, separators=(",", ":"))
    return ("--additional-config", config, "--max-model-len", "2048", "--max-num-seqs", "4", *more)


def assignment(rank: int, args: tuple[str, ...], *, nodes: int, **plan: Any) -> Assignment:
    return Assignment(
        cell="llama-us-east-1-1",
        generation=7,
        rank=rank,
        role=MemberRole.LEADER if rank == 0 else MemberRole.FOLLOWER,
        phase=Phase.SERVE,
        plan=EnginePlan("neuron", "llama-70b", 4, 5400.0, **{"artifact": ARTIFACT, "args": args, **plan}),
        peers=tuple(Peer(f"n-0000000{peer}", peer, f"10.0.0.{peer}", PORT_BASE) for peer in range(nodes)),
        secret="s3cret",
    )


ONE_NODE = assignment(
    0,
    neuron_args(
        {"enable_eagle_speculation": True, "tp_degree": 32},
        *(
            "--speculative-config",
            '{"method":"eagle","model":"s3://models/llama-70b-eagle","num_speculative_tokens":5}',
        ),
        *("--tensor-parallel-size", "32"),
    ),
    nodes=1,
    draft=DRAFT,
    env={"NEURON_COMPILE_CACHE_URL": "s3://cache/neuron"},
)
TWO_NODES = tuple(
    assignment(rank, neuron_args({"local_ranks_size": 32, "tp_degree": 64, "world_size": 64}), nodes=2)
    for rank in range(2)
)
