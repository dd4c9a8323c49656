"""Sums and gathers of a CPU cell's ranks over connections of their own, where gloo takes most of a step's time.

gloo hands each small sum to a thread and waits for it: 0.3 ms of processor time, sixty times a step of SmolLM2. A rank
here sends its part and reads the others' in the thread that computes. What is longer than `FRAME_LIMIT_BYTES` (prompts)
stays gloo's. All ranks add in the order of ranks, so they get the same bits.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import Store

from engine_agent.engines.cell.handshake import derived_key
from engine_agent.engines.vllm.cell import vllm_versions
from engine_agent.engines.vllm.cell.collectives import MEETING_TIMEOUT
from engine_agent.engines.vllm.cell.member import Member
from engine_agent.engines.vllm.cell.mesh import FRAME_LIMIT_BYTES, Connection, meet
from engine_agent.engines.vllm.own_steps import OwnSteps, TimedCollectives, runtime_folder


def use_sockets(member: Member, token: str, store: Store) -> None:
    """Let this rank's worker, whose groups exist, exchange small tensors over sockets. Call it on all ranks, or none.

    Nothing changes where the ranks share memory, where the worker is no CPU worker, or where there is one rank.

    Raises:
        OutOfStep: the ranks did not meet.
    """
    communicator = vllm_versions.network_communicator()
    if communicator is None:
        return
    mesh = meet(
        rank=member.rank,
        size=member.size,
        address=member.address,
        proof=lambda mine, theirs: derived_key(token.encode(), "mesh", mine, theirs),
        publish=lambda rank, place: store.set(f"{token}/mesh/{rank}", place),
        where_is=lambda rank: store.get(f"{token}/mesh/{rank}").decode(),
        within_s=MEETING_TIMEOUT.total_seconds(),
    )
    communicator.dist_module = SocketCollectives(communicator.ranks, member.rank, mesh)


def measure_steps(vllm_config: Any) -> OwnSteps | None:
    """The meter of this rank's steps, whose collectives count as waiting from now on; None: they cannot be told apart,
    as where they are compiled into the model's graph, or are a device's.

    Call it once the worker is built and its collectives are what they will be.
    """
    communicator = vllm_versions.cpu_communicator() if vllm_config.model_config.enforce_eager else None
    if communicator is None:
        return None
    steps = OwnSteps(runtime_folder())
    communicator.dist_module = TimedCollectives(communicator.dist_module, steps)
    return steps


class SocketCollectives:
    """What vLLM's CPU communicator calls of `torch.distributed`, for one group; `ranks` are those of the cell."""

    def __init__(self, ranks: list[int], own: int, mesh: Mapping[int, Connection]) -> None:
        self._ranks, self._own = ranks, own
        self._peers = [mesh[rank] for rank in ranks if rank != own]

    def all_reduce(self, tensor: torch.Tensor, group: Any = None) -> None:
        """Add the ranks' tensors up, in place."""
        if not _is_small(tensor):
            torch.distributed.all_reduce(tensor, group=group)
            return
        parts = self._exchange(tensor)
        if len(parts) == 2:
            tensor.copy_(parts[0]).add_(parts[1])
        else:
            tensor.copy_(torch.stack(parts).sum(0, dtype=_sum_type(tensor)))

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
        """The ranks' tensors, one after the other."""
        if not _is_small(tensor):
            torch.distributed.all_gather_into_tensor(output, tensor, group=group)
            return
        torch.cat([part.reshape(-1) for part in self._exchange(tensor)], out=output.view(-1))

    def gather(self, tensor: torch.Tensor, gather_list: list[torch.Tensor] | None, dst: int, group: Any = None) -> None:
        """The ranks' tensors, of any size, on the cell's rank `dst`; the others have no list."""
        tensor = tensor.contiguous()
        if gather_list is None:
            next(peer for peer in self._peers if peer.rank == dst).send(_bytes_of(tensor))
            return
        parts = dict(zip(self._ranks, gather_list, strict=True))
        parts[self._own].copy_(tensor)
        for peer in self._peers:
            peer.receive_into(_bytes_of(parts[peer.rank]))

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's tensor, in the order of ranks."""
        own = tensor.clone(memory_format=torch.contiguous_format)
        content = _bytes_of(own)
        for peer in self._peers:
            peer.send(content)
        parts = {self._own: own}
        for peer in self._peers:
            parts[peer.rank] = torch.empty_like(own)
            peer.receive_into(_bytes_of(parts[peer.rank]))
        return [parts[rank] for rank in self._ranks]


def _is_small(tensor: torch.Tensor) -> bool:
    length: int = tensor.numel() * tensor.element_size()
    return 0 < length <= FRAME_LIMIT_BYTES


def _sum_type(tensor: torch.Tensor) -> torch.dtype:
    """Short floats add up in float32, and are rounded once."""
    return torch.float32 if tensor.is_floating_point() and tensor.element_size() < 4 else tensor.dtype


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
