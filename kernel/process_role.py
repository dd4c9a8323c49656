"""Which of the control plane's processes this one is, read from its command line, and the priority of its database
sessions."""

import contextlib
import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path


class ProcessRole(StrEnum):
    """The long-running ones, and everything else."""

    WEB = "web"
    CONTROLLER = "controller"
    WORKER = "worker"
    BEAT = "beat"
    SENDER = "sender"
    BATCH = "batch"
    PLANNER = "planner"
    COMMAND = "command"

    @property
    def service(self) -> str:
        return f"switchyard-{self}"


_OF_QUEUE = {"control": ProcessRole.CONTROLLER, "planner": ProcessRole.PLANNER}
_QUEUES = ("-Q", "--queues")
LOOP_ROLES = frozenset(_OF_QUEUE.values())
"""Celery workers that run control loops."""


def process_role(argv: Sequence[str] | None = None) -> ProcessRole:
    """That of a process started with these arguments; of this one, if none are given."""
    arguments = list(sys.argv if argv is None else argv)
    program = arguments[0] if arguments else ""
    if program.endswith("/controlplane/web.py") or "uvicorn" in program:
        return ProcessRole.WEB
    if "celery" in program:
        return _celery_role(arguments)
    commands = (ProcessRole.SENDER, ProcessRole.BATCH)
    return next((role for role in commands if arguments[1:2] == [role]), ProcessRole.COMMAND)


def _celery_role(arguments: Sequence[str]) -> ProcessRole:
    if ProcessRole.WORKER not in arguments:
        return ProcessRole.BEAT if ProcessRole.BEAT in arguments else ProcessRole.COMMAND
    stated = [
        following if option in _QUEUES else option.removeprefix("--queues=").removeprefix("-Q")
        for option, following in pairwise([*arguments, ""])
        if option.startswith(_QUEUES)
    ]
    queues = {queue for each in stated for queue in each.split(",")}
    return next((role for queue, role in _OF_QUEUE.items() if queue in queues), ProcessRole.WORKER)


# PostgreSQL's backends get the place in the queue for the processor that their client has.
# Each backend is a session of its own. Where the kernel shares processors by session, one that answers a control
# loop waits behind everything else of its host, whatever priority the loop has, and a pass makes a hundred queries.
# Only for a client that goes before others, and a backend of the same host; only root may do it.

_KNOWN_MAX = 1000
_placed: set[int] = set()


def backend_place(pid: int, host: str) -> None:
    """To be called for each new connection: `pid` of its backend, `host` as libpq has it."""
    nice = own_session_nice()
    if nice >= 0 or pid in _placed or not (host.startswith("/") or host in {"127.0.0.1", "::1", "localhost"}):
        return
    if len(_placed) >= _KNOWN_MAX:
        _placed.clear()
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        # In a container of its own, PostgreSQL numbers its processes otherwise: the number may be somebody else's here.
        if (process / "cmdline").read_bytes().startswith(b"postgres: "):
            (process / "autogroup").write_text(str(nice), encoding="ascii")
            _placed.add(pid)


@cache
def own_session_nice() -> int:
    """Of this process's session: below 0 goes before others; 0 also where the kernel shares otherwise."""
    with contextlib.suppress(OSError):
        stated = Path("/proc/self/autogroup").read_text(encoding="ascii")
        if found := re.search(r"nice (-?\d+)\s*$", stated):
            return int(found[1])
    return 0
