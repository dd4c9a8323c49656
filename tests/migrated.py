"""The database of tests as the first process to need one has migrated it: others restore a dump of it, in a fraction of
the time. A dump counts for one state of all that migrations are made of; fleets of scenarios migrate their own."""

import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psycopg
from django.db import connection
from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from psycopg import sql
from psycopg.conninfo import make_conninfo

from controlplane.embedded.postgres import binaries

ROOT = Path(__file__).resolve().parent.parent
DUMPS = Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve() / "tests"
UNUSED_S = 7 * 86400.0
"""After which a dump is removed."""
MADE_OF = ("*/migrations/*.py", "*/models/*.py", "*/models.py", "kernel/**/*.py", "requirements.lock")


class MigratedDatabase:
    """Of this process. `restore` before Django looks for it, and `keep` once it is migrated."""

    def __init__(self, dump: Path) -> None:
        self._dump = dump
        self._lock: IO[str] | None = None

    def restore(self) -> None:
        """Make it of the dump; without one, have others wait until `keep` has written it."""
        if not self._dump.exists():
            lock = self._dump.with_suffix(".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._dump.exists():
                self._lock = lock
                return
            lock.close()
        settings = connection.settings_dict
        name = settings["TEST"]["NAME"] or f"{TEST_DATABASE_PREFIX}{settings['NAME']}"
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as server:
            server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        self._dump.touch()
        options = ("--exit-on-error", "--single-transaction", f"--dbname={_address(name)}")
        _run("pg_restore", *options, str(self._dump))

    def keep(self) -> None:
        """Write the dump that others wait for."""
        if self._lock is None:
            return
        unfinished = self._dump.with_suffix(f".{os.getpid()}")
        _run("pg_dump", "--format=custom", f"--file={unfinished}", _address(connection.settings_dict["NAME"]))
        unfinished.rename(self._dump)
        self._lock.close()
        for other in self._dump.parent.iterdir():
            if other.stat().st_mtime < time.time() - UNUSED_S:
                other.unlink(missing_ok=True)


@contextmanager
def migrated_database() -> Iterator[MigratedDatabase]:
    DUMPS.mkdir(parents=True, exist_ok=True)
    database = MigratedDatabase(DUMPS / f"{_digest()}.dump")
    yield database
    if database._lock is not None:
        database._lock.close()


def _digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(file for pattern in MADE_OF for file in ROOT.glob(pattern)):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:20]


def _address(name: str) -> str:
    return make_conninfo(os.environ["DATABASE_URL"], dbname=name)


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run([binaries() / program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program}: {done.stderr}"
