"""Which of the control plane's processes this one is, read from its command line. Pure."""

import sys
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise


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
