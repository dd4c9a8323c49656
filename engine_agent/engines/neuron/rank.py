"""What one rank adds to the plan that all ranks of a cell share: its part of the devices, its environment, its caches.

Pure: it reads and writes no file, and knows nothing of how processes are started.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_agent.engines.base import EngineContext, EngineUnavailable, follower_count
from engine_agent.engines.plan_artifacts import json_option, with_json_option, with_local_draft
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import COLLECTIVES_MASTER, ROOT_COMMUNICATOR

NEURON_FOLDER = "neuron"
KEY_DIGITS = 16


@dataclass(frozen=True)
class NodePart:
    """A node's part of a compiled model that spans several nodes: `ranks` devices from number `first` on."""

    first: int
    ranks: int


def node_part(args: Sequence[str], rank: int) -> NodePart | None:
    """This rank's part as the plan's arguments imply it; None in a cell of one node.

    Raises:
        EngineUnavailable: the plan's NxDI configuration is no JSON.
    """
    override = json_option(args, "--additional-config").get("override_neuron_config", {})
    ranks = override.get("local_ranks_size")
    return None if ranks is None else NodePart(rank * ranks, ranks)


def rank_args(assignment: Assignment, cache: Path) -> tuple[str, ...]:
    """The plan's arguments with this rank's `start_rank_id`, and with the draft model where it lies on this node.

    Raises:
        EngineUnavailable: a JSON argument of the plan is none, or the cell has several nodes and the plan has not.
    """
    plan = assignment.plan
    part = node_part(plan.args, assignment.rank)
    if part is None and follower_count(assignment):
        raise EngineUnavailable(
            f"cell {assignment.cell} has {follower_count(assignment) + 1} nodes, but the plan's override_neuron_config "
            f"has no local_ranks_size: it was rendered for one"
        )
    args = tuple(plan.args)
    if part is not None:
        config = json_option(args, "--additional-config")
        config["override_neuron_config"]["start_rank_id"] = part.first
        args = with_json_option(args, "--additional-config", config)
    return with_local_draft(args, plan, cache)


def rank_environment(assignment: Assignment, context: EngineContext) -> dict[str, str]:
    """Variables of Neuron for this rank; the plan may replace those of caches and of the network.

    The compiled model is found by everything it depends on, because the plugin takes what lies in
    NEURON_COMPILED_ARTIFACTS without comparing. It is a rank's own: a rank's part of the devices is compiled in.
    """
    folder = context.home / NEURON_FOLDER
    args = rank_args(assignment, context.cache)
    compiled = folder / "compiled" / _compile_key(assignment, args) / f"rank-{assignment.rank}"
    wanted = {
        "VLLM_PLUGINS": "neuron",
        "NEURON_COMPILED_ARTIFACTS": str(compiled),
        "NEURON_COMPILE_CACHE_URL": str(folder / "compile-cache"),
    }
    part = node_part(assignment.plan.args, assignment.rank)
    return wanted if part is None else wanted | _several_nodes(assignment, context, part)


def _several_nodes(assignment: Assignment, context: EngineContext, part: NodePart) -> dict[str, str]:
    """As in examples/neuron/multi_node of https://github.com/aws-neuron/upstreaming-to-vllm (tag 2.24.0)."""
    host, port_base = _leader(assignment, context)
    return {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port_base + COLLECTIVES_MASTER),
        "NEURON_RT_ROOT_COMM_ID": f"{host}:{port_base + ROOT_COMMUNICATOR}",
        "ENABLE_NEURON_MULTI_NODE": "true",
        "WORLD_SIZE": str(follower_count(assignment) + 1),
        "NEURON_RANK_ID": str(assignment.rank),
        "NEURON_LOCAL_TP": str(part.ranks),
    }


def _leader(assignment: Assignment, context: EngineContext) -> tuple[str, int]:
    if assignment.rank == 0:
        return context.host, context.port_base
    for peer in assignment.peers:
        if peer.rank == 0:
            return peer.address, peer.port_base
    raise EngineUnavailable(f"cell {assignment.cell} names no peer of rank 0, so rank {assignment.rank} has no leader")


def _compile_key(assignment: Assignment, args: Sequence[str]) -> str:
    digests = [item.digest for item in (assignment.plan.artifact, assignment.plan.draft) if item is not None]
    return hashlib.sha256(json.dumps([digests, list(args)]).encode()).hexdigest()[:KEY_DIGITS]
