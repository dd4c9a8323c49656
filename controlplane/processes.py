"""The processes of the control plane. The launcher, the container's entry point, `make status` and the help are made of
this table; tests compare the systemd units and the documents with it.

    python -m controlplane.processes NAME [OPTIONS]    # becomes that process

Imports no Django: the launcher must start when the settings are broken."""

import fcntl
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kernel.process_role import ProcessRole

GATE = "SWITCHYARD_GATE"
"""Names the file that the launcher keeps locked until the database is ready. Its processes load their code meanwhile.
"""


def wait_for_database() -> None:
    """Wait for the launcher, if one started this process.

    Raises:
        SystemExit: the launcher ended before the database was ready.
    """
    if path := os.environ.pop(GATE, ""):
        with open(path) as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
            if not gate.read():
                sys.exit("the launcher ended before the database was ready")


UNCHECKED = {"CELERY_SKIP_CHECKS": "1"}
"""Django's checks load the whole API, over a second of a processor in each process. The tests run them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessKind:
    """`arguments` of Python. The launcher's death sends `death_signal`. `nice` is explained under "CPU priority" in
    docs/design/control-plane.md."""

    role: ProcessRole
    arguments: tuple[str, ...]
    does: str
    how_many: str
    needs: str
    health: str
    nice: int = 0
    stop_within_s: float = 5.0
    death_signal: signal.Signals = signal.SIGTERM
    environment: Mapping[str, str] = field(default_factory=dict)


def _celery_worker(role: ProcessRole, *options: str) -> tuple[str, ...]:
    # Celery's advice against root is for workers that unpickle untrusted messages; ours read JSON.
    python = ("-W", "ignore:You're running the worker", "-m", "celery", "--quiet", "-A", "controlplane.celery:app")
    common = ("worker", "--hostname", f"{role}@%h", "--without-gossip", "--without-mingle", "--loglevel", "info")
    # Heartbeats are for monitors alone; Celery's 2 s cost a millisecond of CPU time each second.
    return (*python, *common, "--heartbeat-interval", "10", *options)


PROCESSES = (
    ProcessKind(
        role=ProcessRole.WEB,
        arguments=("-m", "controlplane.web"),
        does="dashboard, API and connections of agents",
        how_many="one per control host",
        needs="PostgreSQL; Valkey for live pages",
        health="`/healthz`; incident `control-host`",
        nice=-5,
        stop_within_s=8.0,  # requests that run have 3 s (controlplane.web)
    ),
    ProcessKind(
        role=ProcessRole.CONTROLLER,
        arguments=_celery_worker(ProcessRole.CONTROLLER, "--queues", "control", "--task-events"),
        does="control loops: healing, rollouts, routing, autoscaling, forecasts",
        how_many="one per control host; leases select who acts",
        needs="PostgreSQL; Valkey only for `celery inspect`",
        health="age of passes; incident `control-loop-stale`",
        nice=-5,
        stop_within_s=10.0,
        environment=UNCHECKED,
    ),
    ProcessKind(
        role=ProcessRole.WORKER,
        arguments=_celery_worker(ProcessRole.WORKER, "--pool", "prefork", "--concurrency", "2"),
        does="housekeeping and its schedule (beat): usage, history, retention",
        how_many="one per control host; a lease selects the schedule",
        needs="PostgreSQL and Valkey",
        health="age of the queue",
        nice=5,
        stop_within_s=10.0,
        death_signal=signal.SIGQUIT,  # tasks are acknowledged late, and repeated
        environment=UNCHECKED,
    ),
    ProcessKind(
        role=ProcessRole.JOBS,
        arguments=("manage.py", "jobs"),
        does="near-real-time requests, batches, webhooks, callbacks, queues of SQS, benchmarks, model imports",
        how_many="one or more per control host",
        needs="PostgreSQL, the ingresses, the file store",
        health="age of passes; incident `control-loop-stale`",
    ),
)
BY_NAME = {str(kind.role): kind for kind in PROCESSES}


def main(arguments: Sequence[str]) -> None:
    """Become the named process. Raises SystemExit if there is no such process; the text names all."""
    kind = BY_NAME.get(arguments[0]) if arguments else None
    if kind is None:
        known = "".join(f"\n  {name:<12}{each.does}" for name, each in BY_NAME.items())
        sys.exit(f"usage: python -m controlplane.processes NAME [OPTIONS]; the processes are:{known}")
    os.execve(  # noqa: S606 - no shell
        sys.executable, [sys.executable, *kind.arguments, *arguments[1:]], {**os.environ, **kind.environment}
    )


if __name__ == "__main__":
    main(sys.argv[1:])
