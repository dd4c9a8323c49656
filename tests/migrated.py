"""The database of tests as the first process to need one has migrated it: others fill theirs from the same dump as new
homes do (controlplane.embedded.layout)."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psycopg
from django.db import connection
from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from psycopg import sql
from psycopg.conninfo import make_conninfo

from audit.services import application_role_grant
from controlplane.embedded.layout import Layout
from controlplane.embedded.postgres import APPLICATION

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = Layout(Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve() / "layouts")


class MigratedDatabase:
    """Of this process. `restore` before Django looks for it, and `keep` once it is migrated."""

    def __init__(self) -> None:
        self._lock: IO[str] | None = None

    def restore(self) -> None:
        """Fill it from the dump; without one, have others wait until `keep` has written it."""
        if not LAYOUT.dump.exists():
            lock = LAYOUT.dump.with_suffix(".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not LAYOUT.dump.exists():
                self._lock = lock
                return
            lock.close()
        settings = connection.settings_dict
        name = settings["TEST"]["NAME"] or f"{TEST_DATABASE_PREFIX}{settings['NAME']}"
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
            server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        with psycopg.connect(_address(name), autocommit=True) as database:
            assert LAYOUT.restore(database), "the dump is unusable and now removed: run the tests again"

    def keep(self) -> None:
        """Write the dump that others wait for."""
        if self._lock is None:
            return
        application_role_grant(role=APPLICATION)
        LAYOUT.keep(_address(connection.settings_dict["NAME"]))
        self._lock.close()


@contextmanager
def migrated_database() -> Iterator[MigratedDatabase]:
    LAYOUT.dumps.mkdir(parents=True, exist_ok=True)
    database = MigratedDatabase()
    yield database
    if database._lock is not None:
        database._lock.close()


def _address(name: str) -> str:
    return make_conninfo(os.environ["DATABASE_URL"], dbname=name)
