"""The role of this process, read from its command line, with the priority, URL and time limits of its database
sessions."""

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any


class ProcessRole(StrEnum):
    """The long-running ones, and everything else."""

    WEB = "web"
    CONTROLLER = "controller"
    WORKER = "worker"
    JOBS = "jobs"
    COMMAND = "command"

    @property
    def service(self) -> str:
        return f"switchyard-{self}"


CONTROL_QUEUE = "control"
_QUEUES = ("-Q", "--queues")


def process_role(argv: Sequence[str] | None = None) -> ProcessRole:
    """Returns the role of a process with these arguments, by default of this process."""
    arguments = list(sys.argv if argv is None else argv)
    program = arguments[0] if arguments else ""
    if program.endswith("/controlplane/web.py") or "uvicorn" in program:
        return ProcessRole.WEB
    if "celery" in program:
        return _celery_role(arguments)
    return ProcessRole.JOBS if arguments[1:2] == [ProcessRole.JOBS] else ProcessRole.COMMAND


def _celery_role(arguments: Sequence[str]) -> ProcessRole:
    if ProcessRole.WORKER not in arguments:
        return ProcessRole.COMMAND
    stated = [
        following if option in _QUEUES else option.removeprefix("--queues=").removeprefix("-Q")
        for option, following in pairwise([*arguments, ""])
        if option.startswith(_QUEUES)
    ]
    queues = {queue for each in stated for queue in each.split(",")}
    return ProcessRole.CONTROLLER if CONTROL_QUEUE in queues else ProcessRole.WORKER


# PostgreSQL's backends get the CPU priority of their client.
# Each backend is a separate session. Where the kernel shares processors by session, a backend of a control loop waits
# behind all other sessions of its host regardless of the loop's priority, and a pass makes a hundred queries.
# Only for a client with a higher priority and a backend on the same host; only root may do it.

_KNOWN_MAX = 1000
_placed: set[int] = set()


def backend_place(pid: int, host: str) -> None:
    """Called for each new connection: `pid` of its backend, `host` as in libpq."""
    nice = own_session_nice()
    if nice >= 0 or pid in _placed or not (host.startswith("/") or host in {"127.0.0.1", "::1", "localhost"}):
        return
    if len(_placed) >= _KNOWN_MAX:
        _placed.clear()
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        # In a separate container PostgreSQL has other pids, so the pid may be another process here.
        if (process / "cmdline").read_bytes().startswith(b"postgres: "):
            (process / "autogroup").write_text(str(nice), encoding="ascii")
            _placed.add(pid)


@cache
def own_session_nice() -> int:
    """Returns the priority of this process's session: below 0 precedes others; 0 if the kernel does not share by
    session."""
    with contextlib.suppress(OSError):
        stated = Path("/proc/self/autogroup").read_text(encoding="ascii")
        if found := re.search(r"nice (-?\d+)\s*$", stated):
            return int(found[1])
    return 0


SCHEMES = ("postgres://", "postgresql://")


class BadDatabaseUrl(ValueError):
    """Not such a URL; the text has the error, without the password."""


def database_settings(url: str) -> dict[str, Any]:
    """Returns `NAME`, `USER`, `PASSWORD`, `HOST`, `PORT` and, in `OPTIONS`, the other parts of the URL.

    Of several hosts the one that takes writes is used, unless the URL sets `target_session_attrs`. Raises
    BadDatabaseUrl if it is not such a URL."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    if not url.startswith(SCHEMES):
        raise BadDatabaseUrl("DATABASE_URL must be postgres://USER:PASSWORD@HOST:PORT/NAME, of several hosts HOST,HOST")
    try:
        stated = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except ProgrammingError as error:
        raise BadDatabaseUrl(f"DATABASE_URL cannot be read: {_without_secrets(str(error), url)}") from None
    host, port = stated.pop("host", ""), stated.pop("port", "")
    if "," in host:
        _require_a_port_of_each(host, port)
        stated.setdefault("target_session_attrs", "read-write")
    return {
        "NAME": stated.pop("dbname", ""),
        "USER": stated.pop("user", ""),
        "PASSWORD": stated.pop("password", ""),
        "HOST": host,
        "PORT": port,
        "OPTIONS": stated,
    }


def _require_a_port_of_each(host: str, port: str) -> None:
    hosts, ports = host.count(",") + 1, port.count(",") + 1
    if ports not in {1, hosts}:
        raise BadDatabaseUrl(f"DATABASE_URL names {hosts} hosts and {ports} ports: give each host its port, or all one")


def _without_secrets(text: str, url: str) -> str:
    """Returns libpq's error without the URL or the part that it could not read."""
    return " ".join(text.replace(url, "it").split()) if "@" not in text.replace(url, "") else "its form is wrong"


# Time limits at PostgreSQL by kind of process: they bound statements, locks and forgotten transactions, and detect a
# server that vanished.


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits for a silent server. `connect_s`: for a new connection to one host; a running one answers in milliseconds.
    `idle_s`, `interval_s`, `probes`: keepalives, after which a silent peer counts as dead. `unacknowledged_ms`: closes
    a connection with unacknowledged data, because keepalives are not sent while data waits."""

    connect_s: int
    idle_s: int
    interval_s: int
    probes: int
    unacknowledged_ms: int


ALONE = Patience(connect_s=5, idle_s=10, interval_s=5, probes=3, unacknowledged_ms=20_000)
WITH_STANDBY = Patience(connect_s=2, idle_s=3, interval_s=2, probes=2, unacknowledged_ms=7_000)
"""Another host may have taken over, and decisions continue within 15 s of that (I8)."""


@dataclass(frozen=True, slots=True)
class DatabaseLimits:
    """Seconds. `idle_s`: maximum idle time of an open transaction."""

    statement_s: int
    lock_s: int
    idle_s: int


SERVING = DatabaseLimits(statement_s=20, lock_s=10, idle_s=30)
"""Processes that users, agents or the fleet wait for. Statements take milliseconds at 10,000 nodes."""
HOUSEKEEPING = DatabaseLimits(statement_s=120, lock_s=30, idle_s=60)
"""Deleting a month of events; a task's own limit."""
COMMANDS = DatabaseLimits(statement_s=3600, lock_s=60, idle_s=600)
"""Commands, such as migrations of large tables. One that waits for a lock must not block the statements behind it."""
LIMITS = {ProcessRole.WORKER: HOUSEKEEPING, ProcessRole.COMMAND: COMMANDS}


def connection_options(
    environment: Mapping[str, str], role: ProcessRole | None = None, *, has_standby: bool = False
) -> dict[str, object]:
    """Returns libpq's parameters for the connections of a process, by default this one. They include `PGOPTIONS`, which
    `options` would replace."""
    patience = WITH_STANDBY if has_standby else ALONE
    limits = LIMITS.get(role or process_role(), SERVING)
    stated = {
        "statement_timeout": limits.statement_s,
        "lock_timeout": limits.lock_s,
        "idle_in_transaction_session_timeout": limits.idle_s,
    }
    options = " ".join(f"-c {name}={seconds}s" for name, seconds in stated.items())
    return {
        "connect_timeout": patience.connect_s,
        "options": f"{options} {environment.get('PGOPTIONS', '')}".strip(),
        "keepalives": 1,
        "keepalives_idle": patience.idle_s,
        "keepalives_interval": patience.interval_s,
        "keepalives_count": patience.probes,
        "tcp_user_timeout": patience.unacknowledged_ms,
    }
