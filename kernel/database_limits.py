"""How long anything may wait at PostgreSQL, by kind of process: no statement, lock or forgotten transaction holds up
others for ever, and a server that vanished without a word is noticed. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kernel.process_role import ProcessRole, process_role

CONNECT_S = 5
"""One that is up answers in milliseconds."""
KEEPALIVES = {"keepalives": 1, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
"""A silent peer is dead after 25 s (seconds, seconds, probes)."""
UNACKNOWLEDGED_MS = 20_000
"""What was sent and not acknowledged for so long ends the connection: keepalives are not sent while data waits."""


@dataclass(frozen=True, slots=True)
class DatabaseLimits:
    """Seconds. `idle_s`: how long a transaction may be open while nothing is requested in it."""

    statement_s: int
    lock_s: int
    idle_s: int


SERVING = DatabaseLimits(statement_s=20, lock_s=10, idle_s=30)
"""Whom somebody waits for: users, agents, the fleet. Statements take milliseconds at 10,000 nodes."""
HOUSEKEEPING = DatabaseLimits(statement_s=120, lock_s=30, idle_s=60)
"""Deleting a month of events; a task's own limit."""
COMMANDS = DatabaseLimits(statement_s=3600, lock_s=60, idle_s=600)
"""A person's: migrations of large tables. One that cannot get its lock must not stand in the way of all behind it."""
LIMITS = {ProcessRole.WORKER: HOUSEKEEPING, ProcessRole.COMMAND: COMMANDS}


def connection_options(environment: Mapping[str, str], role: ProcessRole | None = None) -> dict[str, object]:
    """libpq's parameters for the connections of a process; of this one, if no role is given. What `PGOPTIONS` states is
    kept, because `options` would replace it."""
    limits = LIMITS.get(role or process_role(), SERVING)
    stated = {
        "statement_timeout": limits.statement_s,
        "lock_timeout": limits.lock_s,
        "idle_in_transaction_session_timeout": limits.idle_s,
    }
    options = " ".join(f"-c {name}={seconds}s" for name, seconds in stated.items())
    return {
        "connect_timeout": CONNECT_S,
        "options": f"{options} {environment.get('PGOPTIONS', '')}".strip(),
        **KEEPALIVES,
        "tcp_user_timeout": UNACKNOWLEDGED_MS,
    }
