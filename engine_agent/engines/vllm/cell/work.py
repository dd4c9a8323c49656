"""What leader and followers do alike: place and build the worker that the platform would use.

Nothing here knows which kind of device it runs on; vLLM's configuration names the worker class.
"""

from dataclasses import dataclass
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from engine_agent.engines.cell.handshake import derived_key
from engine_agent.engines.vllm.cell import vllm_versions
from engine_agent.engines.vllm.cell.member import CellEnded, Member

EXECUTOR_PROTOCOL = "5"
"""Raise it when calls or the setup change: members that differ in it must not form a cell."""


@dataclass(frozen=True)
class Setup:
    """What the leader publishes to its followers: its whole engine configuration, and where groups meet."""

    vllm_config: Any
    store_port: int
    nonce: str


@dataclass(frozen=True)
class Call:
    """One call of a worker's method; `method` is its name, or a function as cloudpickle writes it."""

    method: str | bytes
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def software() -> dict[str, str]:
    """What calls depend on, beside the fingerprint of the node."""
    return {"executor_protocol": EXECUTOR_PROTOCOL, "vllm": vllm.__version__}


def place_worker(vllm_config: Any, member: Member) -> int:
    """The worker's rank in its own world; adjusts `vllm_config` where a rank has a part of its own in it.

    With one worker per device, the world is the cell. A Neuron worker drives a whole node and is alone in its world;
    its ranks are the node's part of the compiled model's.

    Raises:
        CellEnded: the configuration does not fit the size of the cell.
    """
    world_size = vllm_config.parallel_config.world_size
    if world_size == member.size:
        return member.rank
    neuron = (vllm_config.additional_config or {}).get("override_neuron_config")
    if world_size == 1 and neuron is not None and "local_ranks_size" in neuron:
        neuron["start_rank_id"] = member.rank * neuron["local_ranks_size"]
        return 0
    raise CellEnded(
        f"the configuration makes a world of {world_size} ranks and the cell has {member.size} nodes of one rank each: "
        f"the product of tensor_parallel and the other degrees must be {member.size}"
    )


def build_follower(vllm_config: Any, member: Member, init_method: str) -> WorkerWrapperBase:
    """A follower's worker with its weights loaded, as vLLM's own executors build theirs."""
    rank = place_worker(vllm_config, member)
    worker = vllm_versions.new_worker(WorkerWrapperBase, vllm_config, member.rank)
    worker.init_worker(
        all_kwargs=[
            {
                "vllm_config": vllm_config,
                "local_rank": 0,
                "rank": rank,
                "distributed_init_method": init_method,
                "is_driver_worker": False,
                "shared_worker_lock": None,
            }
        ]
    )
    worker.init_device()
    worker.load_model()
    vllm_versions.update_block_size(current_platform, vllm_config)
    return worker


def cell_token(secret: bytes, member: Member, nonce: str) -> str:
    """What only members can tell of this start of the cell, 64 hexadecimal digits."""
    return derived_key(secret, "meeting", member.cell, member.generation, nonce).hex()
