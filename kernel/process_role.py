"""Which of the control plane's processes this one is, read from its command line. Pure."""

import sys
from collections.abc import Sequence
from enum import StrEnum


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


def process_role(argv: Sequence[str] | None = None) -> ProcessRole:
    """That of a process started with these arguments; of this one, if none are given."""
    arguments = list(sys.argv if argv is None else argv)
    program = arguments[0] if arguments else ""
    if program.endswith("/controlplane/web.py") or "uvicorn" in program:
        return ProcessRole.WEB
    if "celery" in program:
        return next((role for role in (ProcessRole.WORKER, ProcessRole.BEAT) if role in arguments), ProcessRole.COMMAND)
    commands = (ProcessRole.CONTROLLER, ProcessRole.SENDER, ProcessRole.BATCH, ProcessRole.PLANNER)
    return next((role for role in commands if arguments[1:2] == [role]), ProcessRole.COMMAND)
