"""Where the workers' own process groups meet: a rendezvous store of the cell.

The store authenticates nobody, so only members learn its port, its keys begin with a token that only they can derive,
and it listens on the node's own address. The workers' collectives carry what the platform makes of them, in plain, and
trust the network between the nodes. No call goes through them.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

SCHEME = "switchyard"
MEETING_TIMEOUT = timedelta(minutes=5)
"""For members to find each other in the store, after all of them have joined."""
COLLECTIVES_VARIABLE = "SWITCHYARD_CELL_COLLECTIVES"
"""In a plan's environment: `shared-memory` or `network`, see `uses_shared_memory`."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Linux has it; nothing is created there under a guessable name)


def host_store(address: str) -> TCPStore:
    """A store that listens on this address alone, on a port of the system's choice."""
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


def workers_meet_in(store: Store, token: str, rank: int, size: int) -> str:
    """Make torch's default group meet in `store`; returns the `init_method` that says so, and ends in `:<identity>`.

    vLLM's CPU workers name their shared memory after what follows the last colon. Ranks that have the same /dev/shm
    may get the same name; where names differ, ranks talk through gloo.
    """
    place = f"rank-{rank}"
    if uses_shared_memory(os.environ, len(os.sched_getaffinity(0)), size):
        place = f"{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}-{os.stat(SHARED_MEMORY).st_dev}"

    def meet(url: str, timeout: timedelta = MEETING_TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
        query = dict(part.split("=") for part in url.partition("?")[2].split("&"))
        yield PrefixStore(f"{token}/workers", store), int(query["rank"]), int(query["world_size"])

    register_rendezvous_handler(SCHEME, meet)
    return f"{SCHEME}://workers:{shared_memory_name(token)}-{place}"


def uses_shared_memory(environment: Mapping[str, str], cores: int, size: int) -> bool:
    """Whether CPU ranks on one machine use shared memory, which they wait for without ever giving up their core.

    Unsaid, they do where every rank can have a core and one is left. Measured on two cores with two ranks and much else
    to do: 1.7 tokens/s with shared memory, 8 to 9 through gloo, because a waiting rank keeps the awaited one away.
    """
    chosen = environment.get(COLLECTIVES_VARIABLE)
    return chosen == "shared-memory" if chosen else cores > size


def shared_memory_name(token: str) -> str:
    """What the names of this generation's shared memory begin with."""
    return f"{SCHEME}-{token[:16]}"


def remove_shared_memory(token: str) -> None:
    """Take the names of this generation's shared memory away; who has it mapped keeps it, and it ends with them."""
    for segment in SHARED_MEMORY.glob(f"*{shared_memory_name(token)}*"):
        segment.unlink(missing_ok=True)
