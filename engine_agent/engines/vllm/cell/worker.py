"""A rank's worker: how it is placed and built, where process groups meet, and the life of a follower: join the leader,
build the same workers from the leader's configuration, run its calls, exit with it. Ranks are numbered node by node. A
node's first worker runs in the process that leads or follows, further ones in processes of `local_workers`.

Process groups meet in a rendezvous store of the cell. The store authenticates no client, so only members receive its
port, its keys begin with a token that only they can derive, and it listens on the node's address alone. Collectives are
unencrypted: the network between nodes must be trusted. Calls do not use them."""

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

import cloudpickle
import torch
import vllm
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from engine_agent.engines.handshake import derived_key
from engine_agent.engines.vllm import vllm_versions
from engine_agent.engines.vllm.cell.follower_link import FollowerLink
from engine_agent.engines.vllm.cell.local_workers import CAUSE_FIRST_S, LocalWorkers, OwnerLink, parts_of
from engine_agent.engines.vllm.cell.member import CellEnded, Member, Shutdown, secret_from
from engine_agent.engines.vllm.steps import Step, measure_steps, take_step
from engine_agent.protocol.fingerprint import fingerprint_from

EXECUTOR_PROTOCOL = "7"
"""Raise it when calls or the setup change: members that differ in it must not form a cell."""


@dataclass(frozen=True)
class Setup:
    """What the leader publishes to its followers: its engine configuration, and where groups meet."""

    vllm_config: Any
    store_port: int
    nonce: str


@dataclass(frozen=True)
class Call:
    """One call of a worker's method; `method` is its name, or a function serialized by cloudpickle."""

    method: str | bytes
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def software() -> dict[str, str]:
    """Returns what calls depend on, besides the fingerprint of the node."""
    return {"executor_protocol": EXECUTOR_PROTOCOL, "vllm": vllm.__version__}


def workers_per_node(vllm_config: Any, member: Member) -> int:
    """Returns the number of workers on each node: one per device, or one that drives a whole Neuron node. Raises
    CellEnded if the configuration does not fit the size of the cell."""
    world_size = vllm_config.parallel_config.world_size
    if world_size % member.size == 0:
        return int(world_size // member.size)
    if _neuron_ranks(vllm_config) is not None:
        return 1
    raise CellEnded(
        f"the configuration makes a world of {world_size} ranks and the cell has {member.size} nodes of as many ranks "
        f"each: the product of tensor_parallel and the other degrees must be a multiple of {member.size}"
    )


def place_worker(vllm_config: Any, member: Member, place: int = 0) -> int:
    """Returns the rank in its world of a node's worker; adjusts `vllm_config` for this rank. A Neuron worker is alone
    in its world; its ranks are the node's part of the compiled model's. Raises CellEnded as `workers_per_node` does."""
    if (neuron := _neuron_ranks(vllm_config)) is not None:
        neuron["start_rank_id"] = member.rank * neuron["local_ranks_size"]
        return 0
    return rank_in_cell(vllm_config, member, place)


def rank_in_cell(vllm_config: Any, member: Member, place: int) -> int:
    """Returns the number of a node's worker among all workers of the cell."""
    return member.rank * workers_per_node(vllm_config, member) + place


def _neuron_ranks(vllm_config: Any) -> dict[str, Any] | None:
    neuron: dict[str, Any] | None = (vllm_config.additional_config or {}).get("override_neuron_config")
    is_alone = vllm_config.parallel_config.world_size == 1
    return neuron if is_alone and neuron is not None and "local_ranks_size" in neuron else None


def output_rank(vllm_config: Any) -> int:
    """Returns the rank whose output of a step is the cell's: the first of the last pipeline stage."""
    stages: int = vllm_config.parallel_config.pipeline_parallel_size
    world_size: int = vllm_config.parallel_config.world_size
    return world_size - world_size // stages


def build_worker(vllm_config: Any, member: Member, init_method: str, place: int) -> WorkerWrapperBase:
    """Returns a worker with loaded weights, built as vLLM's executors build theirs."""
    vllm_versions.adjust_torch(torch)
    rank = place_worker(vllm_config, member, place)
    worker = vllm_versions.new_worker(WorkerWrapperBase, vllm_config, rank_in_cell(vllm_config, member, place))
    worker.init_worker(
        all_kwargs=[
            {
                "vllm_config": vllm_config,
                "local_rank": place,
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
    """Returns a token of this start of the cell that only members can derive, 64 hexadecimal digits."""
    return derived_key(secret, "meeting", member.cell, member.generation, nonce).hex()


SCHEME = "switchyard"
MEETING_TIMEOUT = timedelta(minutes=5)
"""For members to find each other in the store, after all of them have joined."""
COLLECTIVES_VARIABLE = "SWITCHYARD_CELL_COLLECTIVES"
"""In a plan's environment: `shared-memory` or `network`, see `uses_shared_memory`."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Linux has it; nothing is created there under a guessable name)


def host_store(address: str) -> TCPStore:
    """Returns a store that listens on this address alone, on a port of the system's choice."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=MEETING_TIMEOUT, wait_for_workers=False)


def workers_meet_in(store: Store, token: str, rank: int, *, shares: bool) -> str:
    """Makes torch's default group meet in `store`; returns its `init_method`, which ends in `:<identity>`. vLLM's CPU
    workers name their shared memory after the text behind the last colon. Ranks with the same /dev/shm may get the same
    name; ranks with different names use gloo. `shares`: see `uses_shared_memory`."""
    place = f"rank-{rank}"
    if shares:
        place = f"{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}-{os.stat(SHARED_MEMORY).st_dev}"

    def meet(url: str, timeout: timedelta = MEETING_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
        query = dict(part.split("=") for part in url.partition("?")[2].split("&"))
        yield PrefixStore(f"{token}/workers", store), int(query["rank"]), int(query["world_size"])

    register_rendezvous_handler(SCHEME, meet)
    return f"{SCHEME}://workers:{shared_memory_name(token)}-{place}"


def ranks_share_memory(vllm_config: Any, member: Member) -> bool:
    """See `uses_shared_memory`. Call it before this process is bound to a part of the node's cores."""
    ranks = member.size * workers_per_node(vllm_config, member)
    return uses_shared_memory(os.environ, len(os.sched_getaffinity(0)), ranks)


def uses_shared_memory(environment: Mapping[str, str], cores: int, size: int) -> bool:
    """Whether CPU ranks on one machine use shared memory, where a waiting rank never yields its core. By default they
    do if every rank can have a core and one is left. Measured on two busy cores with two ranks: 1.7 tokens/s with
    shared memory, 8 to 9 through gloo, because waiting ranks block the others."""
    chosen = environment.get(COLLECTIVES_VARIABLE)
    return chosen == "shared-memory" if chosen else cores > size


def shared_memory_name(token: str) -> str:
    return f"{SCHEME}-{token[:16]}"


def remove_shared_memory(token: str) -> None:
    """Removes the names of this generation's shared memory; processes that have mapped it keep it until they exit."""
    for segment in SHARED_MEMORY.glob(f"*{shared_memory_name(token)}*"):
        segment.unlink(missing_ok=True)


def start_local_workers(
    vllm_config: Any, member: Member, secret: bytes, model_dir: Path, end: Callable[[str], None]
) -> LocalWorkers:
    """Starts the second and further workers of this node, which build themselves from the `Setup` that they are sent.
    On CPU each worker, this process's included, gets its part of the node's cores. Call it as `LocalWorkers` says.
    Raises CellEnded as `workers_per_node` does."""
    count, first = workers_per_node(vllm_config, member), rank_in_cell(vllm_config, member, 0)
    shares = ranks_share_memory(vllm_config, member)
    cores = parts_of(os.sched_getaffinity(0), count) if current_platform.is_cpu() else []
    work = partial(_work_locally, member, secret, model_dir, shares, cores)
    workers = LocalWorkers(_process_context(count), work, range(first + 1, first + count), end)
    _bind(cores, 0)
    return workers


def _bind(cores: Sequence[frozenset[int]], place: int) -> None:
    if cores:
        os.sched_setaffinity(0, cores[place])  # of this thread, and of those that it starts


def _process_context(workers: int) -> BaseContext:
    """Forks on CPU, as the engine's core (`core_process`): another import of vLLM takes most of a start. vLLM chooses
    for devices."""
    if workers == 1 or current_platform.is_cpu():
        return get_context("fork")
    from vllm.utils.system_utils import get_mp_context

    context: BaseContext = get_mp_context()
    return context


def _work_locally(
    member: Member,
    secret: bytes,
    model_dir: Path,
    shares: bool,
    cores: Sequence[frozenset[int]],
    place: int,
    owner: OwnerLink,
) -> None:
    _bind(cores, place)
    setup: Setup = pickle.loads(owner.receive())  # noqa: S301  (from the process that started this one)
    worker = _build(setup, member, secret, model_dir, place, shares=shares)
    gives_output = rank_in_cell(setup.vllm_config, member, place) == output_rank(setup.vllm_config)
    own_steps = measure_steps(setup.vllm_config, place)
    while True:
        number, payload = owner.next_call()
        call: Step | Call = pickle.loads(payload)  # noqa: S301
        if isinstance(call, Call):
            owner.reply(number, answer(worker, call))
            continue
        output = take_step(worker, call, own_steps)
        if gives_output:
            owner.put_out(number, written_output(output))
        else:
            owner.finish(number)


LEAVING_GRACE_S = 5.0
"""How long a stopping follower keeps working while its leader finishes its streams."""
Say = Callable[[str], None]


def follow(member: Member, model_dir: Path, say: Say, shutdown: Shutdown) -> NoReturn:
    """Follows until the cell ends. `say` receives why this member is not ready; an empty text means that it is."""
    secret = secret_from(os.environ)
    link = FollowerLink(member, secret, fingerprint_from(os.environ) | software(), shutdown.end)
    link.on_ready = lambda: _be_ready(member, say)
    shutdown.before_stop = lambda: _leave(link)

    def lose(reason: str) -> NoReturn:
        link.fail(reason)
        shutdown.end(f"{member} failed: {reason}")

    try:
        say(f"looking for the leader at {member.leader_address}:{member.leader_port}")
        published = link.connect(say)
        setup: Setup = pickle.loads(published)  # noqa: S301  (from the authenticated leader)
        shares = ranks_share_memory(setup.vllm_config, member)
        local = start_local_workers(setup.vllm_config, member, secret, model_dir, lose)
        shutdown.hooks.insert(0, lambda _: local.close())
        local.send(published)
        link.finished, local.on_output = local.finished, link.reply
        link.start()
        say("building the engine")
        worker = _build(setup, member, secret, model_dir, 0, shares=shares)
        say("waiting for the leader to be ready")
        _work(worker, link, local, member, setup.vllm_config)
    except CellEnded as error:
        shutdown.end(str(error))
    except Exception as error:
        traceback.print_exc()
        sleep(CAUSE_FIRST_S)
        lose(f"{type(error).__name__}: {error}")


def _be_ready(member: Member, say: Say) -> None:
    say("")
    print(f"ready: {member} follows the leader at {member.leader_address}:{member.leader_port}", flush=True)


def _leave(link: FollowerLink) -> None:
    """Keeps working while the leader, which stops as well, finishes its streams."""
    link.announce_leaving()
    if link.ready:
        sleep(LEAVING_GRACE_S)


def _build(
    setup: Setup, member: Member, secret: bytes, model_dir: Path, place: int, *, shares: bool
) -> WorkerWrapperBase:
    token = cell_token(secret, member, setup.nonce)
    store = join_store(member.leader_address, setup.store_port)
    setup.vllm_config.model_config.model = str(model_dir)  # the same weights may have another path on this node
    rank = rank_in_cell(setup.vllm_config, member, place)
    return build_worker(setup.vllm_config, member, workers_meet_in(store, token, rank, shares=shares), place)


def _work(
    worker: WorkerWrapperBase, link: FollowerLink, local: LocalWorkers, member: Member, vllm_config: Any
) -> NoReturn:
    own_steps = measure_steps(vllm_config)
    gives_output = rank_in_cell(vllm_config, member, 0) == output_rank(vllm_config)
    while True:
        number, payload = link.next_call()
        local.call(number, payload)
        call: Step | Call = pickle.loads(payload)  # noqa: S301  (from the authenticated leader)
        if isinstance(call, Call):
            link.reply(number, pickle.dumps([answer(worker, call), *local.replies(number)]))
        else:
            output = take_step(worker, call, own_steps)
            if gives_output:
                link.reply(number, written_output(output))
        link.done = number


def written_output(output: Any) -> bytes:
    return pickle.dumps(
        output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output, pickle.HIGHEST_PROTOCOL
    )


def answer(worker: WorkerWrapperBase, call: Call) -> bytes:
    """Returns the method's result, or the exception that it raised: all ranks have made the call, so the cell
    continues."""
    try:
        returned: Any = run_method(worker, call.method, call.args, call.kwargs)
    except Exception as error:
        traceback.print_exc()
        returned = RuntimeError(f"{type(error).__name__}: {error}")
    written: bytes = cloudpickle.dumps(returned)
    return written
