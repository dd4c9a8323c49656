"""What hosts of a control plane write of each other into the database, by SQL: the launcher knows no Django. The table
is `kernel.models.ControlHost`; a test compares the two.

Nothing here waits for the standby: what says that it is away must not.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from controlplane.embedded.membership import ControlHost
from controlplane.embedded.replication import Commits, Database, Role, Standby

CONNECT_S = 3
_OPTIONS = "-c statement_timeout=5s -c lock_timeout=5s -c synchronous_commit=local"
_ROLE = """
SELECT pg_is_in_recovery(),
       CASE WHEN pg_is_in_recovery() THEN '0' ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END
"""
_ALIVE = """
INSERT INTO kernel_controlhost AS known (name, address, agent_url, joined_at, seen_at, database, commits, stands_down)
VALUES (%s, %s, %s, clock_timestamp(), clock_timestamp(), %s, '', false)
ON CONFLICT (name) DO UPDATE SET
    address = EXCLUDED.address, agent_url = EXCLUDED.agent_url, seen_at = EXCLUDED.seen_at,
    database = EXCLUDED.database
RETURNING stands_down
"""
_COMMITS = """
UPDATE kernel_controlhost SET
    commits = %(commits)s::varchar, alone_after_s = %(alone_after_s)s::float8, lag_bytes = NULL, lag_s = NULL,
    commits_since = CASE WHEN commits = %(commits)s::varchar THEN commits_since ELSE clock_timestamp() END
WHERE name = %(name)s
"""
_STANDBY = """
UPDATE kernel_controlhost SET
    commits = '', commits_since = NULL, lag_bytes = %(lag_bytes)s::bigint, lag_s = %(lag_s)s::float8,
    reached_at = CASE WHEN %(is_reached)s::boolean THEN clock_timestamp() ELSE reached_at END
WHERE name = %(name)s
"""
_REPLICATION = """
SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), flush_lsn)::bigint,
       coalesce(extract(epoch FROM flush_lag), 0)::float8,
       sync_state IN ('sync', 'quorum'),
       coalesce((SELECT extract(epoch FROM clock_timestamp() - seen_at)::float8
                 FROM kernel_controlhost WHERE name = application_name AND database = 'standby'), 1e9)
FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming' AND flush_lsn IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class PrimaryRecord:
    """What the primary last said of itself."""

    name: str
    commits: Commits
    alone_after_s: float | None


class DatabaseClient:
    """One connection to a database, opened anew when it breaks. Not for two threads at once.

    Each method raises psycopg.Error when the database does not answer.
    """

    def __init__(self, url: str, **parameters: Any) -> None:
        self._url, self._parameters = url, parameters
        self._connection: Any = None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def rows(self, statement: str, parameters: Any = None) -> list[Any]:
        """What a statement returns, in a transaction of its own."""
        import psycopg

        try:
            if self._connection is None:
                stated = {"connect_timeout": CONNECT_S, "options": _OPTIONS, **self._parameters}
                self._connection = psycopg.connect(self._url, autocommit=True, **stated)
            cursor = self._connection.execute(statement, parameters)
            return list(cursor.fetchall()) if cursor.description else []
        except psycopg.OperationalError:
            with suppress(psycopg.Error):
                self.close()
            raise

    def database(self) -> Database:
        """What it is."""
        ((in_recovery, timeline),) = self.rows(_ROLE)
        return Database(Role.STANDBY if in_recovery else Role.PRIMARY, int(timeline, 16))

    def look(self) -> Database | None:
        """What it is, or None if it does not answer."""
        import psycopg

        try:
            return self.database()
        except psycopg.Error:
            return None

    def standby(self, name: str) -> Standby | None:
        """The standby of this name, while it streams from this one."""
        found = self.rows(_REPLICATION, [name])
        return Standby(*found[0]) if found else None

    def note_alive(self, host: ControlHost, database: str) -> bool:
        """Write that this host lives, and say whether it is to stand down."""
        ((stands_down,),) = self.rows(_ALIVE, [host.name, host.address, host.agent_url, database])
        return bool(stands_down)

    def note_commits(self, name: str, commits: Commits, alone_after_s: float | None) -> None:
        """Write whether commits of this primary wait for the standby."""
        self.rows(_COMMITS, {"name": name, "commits": commits.value, "alone_after_s": alone_after_s})

    def note_standby(self, name: str, standby: Standby | None, *, is_reached: bool) -> None:
        """Write how far the standby is, and whether its host was reached."""
        lag = (
            {"lag_bytes": standby.lag_bytes, "lag_s": standby.lag_s} if standby else {"lag_bytes": None, "lag_s": None}
        )
        self.rows(_STANDBY, {"name": name, "is_reached": is_reached, **lag})

    def primary_record(self) -> PrimaryRecord | None:
        """What the primary last wrote of itself, as far as this database has it."""
        found = self.rows("SELECT name, commits, alone_after_s FROM kernel_controlhost WHERE commits <> ''")
        return PrimaryRecord(found[0][0], Commits(found[0][1]), found[0][2]) if len(found) == 1 else None

    def set_standby(self, name: str | None) -> None:
        """Let commits wait for that standby from now on, or for none."""
        if name is None:
            self.rows("ALTER SYSTEM RESET synchronous_standby_names")
        else:
            self.rows(f"ALTER SYSTEM SET synchronous_standby_names = '\"{name}\"'")
        self.rows("SELECT pg_reload_conf()")

    def waits_for(self) -> str:
        """The standby that commits wait for, or ""."""
        ((name,),) = self.rows("SHOW synchronous_standby_names")
        return str(name).strip('"')


def forget_standby(owner_url: str) -> None:
    """Let the database of a control plane of one host wait for no standby, and know of no other host: what it has of
    them is of before, or came with a backup.

    Raises:
        psycopg.Error: it does not answer.
    """
    client = DatabaseClient(owner_url)
    try:
        if client.waits_for():
            client.set_standby(None)
        if client.rows("SELECT 1 FROM pg_class WHERE oid = to_regclass('kernel_controlhost')"):
            client.rows("DELETE FROM kernel_controlhost")
    finally:
        client.close()
