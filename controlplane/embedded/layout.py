"""Fills an empty embedded database from a dump of one that `migrate` filled, in a fraction of the time.

The digest of the files that the tables follow from names the dump. It is also the comment of each complete database, so
`migrate` runs only after these files have changed. A start that is killed before it sets the comment migrates again.
"""

import hashlib
import os
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from controlplane.embedded.configuration import CHECKOUT, CannotStart
from controlplane.embedded.postgres import binaries

if TYPE_CHECKING:
    import psycopg

_APPS = ("accounts", "audit", "fleet", "kernel", "models_registry", "traffic")
_FILES = ("migrations/*.py", "**/models.py", "**/models/*.py", "apps.py")
_MADE_OF = ("audit/*.py", "kernel/**/*.py", "controlplane/settings.py", "requirements.lock")
_DUMP = ("--inserts", "--rows-per-insert=1000", "--no-owner", "--exclude-table-data=audit_*")
"""A new home has no audit records."""
_LAST_LINE = b"PostgreSQL database dump complete"
_DUMP_WITHIN_S = 60.0
_UNUSED_S = 7 * 86400.0
"""After which a dump is removed."""

_TABLES = "SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
_COMMENT = "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = current_database()"
_BEGIN_PASSES = "UPDATE public.kernel_looppass SET passed_at = clock_timestamp()"
"""As migration kernel.0001_initial: the age of a loop that never started counts from the first start."""


def made_of() -> list[Path]:
    """The files that decide which tables and rows `migrate` makes."""
    patterns = [*_MADE_OF, *(f"{app}/{files}" for app in _APPS for files in _FILES)]
    return sorted({file for pattern in patterns for file in CHECKOUT.glob(pattern)})


@cache
def _digest() -> str:
    digest = hashlib.sha256()
    for file in made_of():
        digest.update(f"{file.relative_to(CHECKOUT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:20]


class Found(StrEnum):
    """What a start finds in its database: all tables of this release, none, or others that `migrate` has to change."""

    COMPLETE = "complete"
    EMPTY = "empty"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of this release, with its dump in the folder `dumps`."""

    dumps: Path

    @property
    def dump(self) -> Path:
        return self.dumps / f"{_digest()}.sql"

    def look(self, url: str) -> Found:
        """Returns what is in the database, after it has been filled if it was empty and there is a dump.

        Raises:
            CannotStart: the server closed the connection.
        """
        import psycopg

        try:
            with psycopg.connect(url, autocommit=True) as database:
                if database.execute(_COMMENT).fetchone() == (_digest(),):
                    return Found.COMPLETE
                if count_tables(database):
                    return Found.OTHER
                return Found.COMPLETE if self.restore(database) else Found.EMPTY
        except psycopg.OperationalError as error:
            raise CannotStart(f"PostgreSQL does not answer ({error}).") from error

    def restore(self, database: "psycopg.Connection") -> bool:
        """Fill an empty database, completely or not at all. Returns False, and removes the dump, if it is unusable."""
        import psycopg

        try:
            lines = self.dump.read_bytes().splitlines(keepends=True)
            script = b"".join(line for line in lines if not line.startswith(b"\\"))  # commands of psql
            if _LAST_LINE not in script[-200:]:
                raise ValueError("the dump is incomplete")
            with database.transaction():
                database.execute(script)
                database.execute(_BEGIN_PASSES)
                _set_comment(database)
            self.dump.touch()
        except (OSError, ValueError, psycopg.ProgrammingError, psycopg.IntegrityError):
            self.dump.unlink(missing_ok=True)
            return False
        return True

    def complete(self, url: str) -> None:
        """Note that the database has been migrated and that the application's role has its rights."""
        import psycopg

        with psycopg.connect(url, autocommit=True) as database:
            _set_comment(database)

    def keep(self, url: str) -> None:
        """Write the dump of a database that holds nothing but what `migrate` and `grant_application` made.

        Raises:
            OSError, subprocess.SubprocessError: it cannot be written.
        """
        self.dumps.mkdir(parents=True, exist_ok=True)
        unfinished = self.dump.with_suffix(f".{os.getpid()}")
        command = [str(binaries() / "pg_dump"), *_DUMP, f"--file={unfinished}", url]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_DUMP_WITHIN_S)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.rename(self.dump)
        finally:
            unfinished.unlink(missing_ok=True)
        for other in self.dumps.iterdir():
            if other.stat().st_mtime < time.time() - _UNUSED_S:
                other.unlink(missing_ok=True)


def _set_comment(database: "psycopg.Connection") -> None:
    from psycopg import sql

    name = sql.Identifier(database.info.dbname)
    database.execute(sql.SQL("COMMENT ON DATABASE {} IS {}").format(name, sql.Literal(_digest())))


def count_tables(database: "psycopg.Connection") -> int:
    (count,) = database.execute(_TABLES).fetchone() or (0,)
    return int(count)
