"""Backup and restore of a whole control plane: its database, and the secrets without which that is of no use.

A backup is one tar of three or four small names and a dump; nothing else is read from it. It is made while the fleet
runs, and restored into a home where nothing ever ran: on this host or another."""

import asyncio
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from controlplane.embedded.configuration import CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.layout import count_tables
from controlplane.embedded.postgres import binaries
from controlplane.embedded.privileges import remove_socket_folder, socket_folder
from controlplane.embedded.processes import Program, require_oneshot
from controlplane.embedded.servers import choose_servers, without_password
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Supervisor

FORMAT = 1
MANIFEST, DUMP = "manifest.json", "database.dump"
SECRETS = ("settings.json", "operator-token")
"""Of the home. The key in the first signs sessions and opens what the database keeps encrypted."""
_MAX_SMALL_BYTES = 64 * 1024
_LIMIT_S = 6 * 3600.0
"""A database of many gigabytes on a slow disk; each says meanwhile what it does."""


async def back_up(configuration: Configuration, home: StateDirectory, target: Path, console: Console) -> None:
    """Write a backup to `target`, whole or not at all, readable by its owner only. The fleet may run. Raises
    CannotStart if there is nothing to back up, `target` exists or cannot be written, or the dump failed."""
    _require_backup_possible(configuration, home, target)
    with _scratch(target.parent) as scratch:
        async with _owner_url(configuration, home, console) as url:
            with console.step(f"dump of {without_password(url)}"):
                await _run("pg_dump", ["--format=custom", f"--file={scratch / DUMP}"], url, home, console)
        with console.step(f"writing {target}"):
            size_mib = await asyncio.to_thread(_write, home, scratch, target) / 1024**2
    console.own(f"backup of {size_mib:.1f} MiB; it opens everything: keep it as you keep keys")


def _require_backup_possible(configuration: Configuration, home: StateDirectory, target: Path) -> None:
    if target.exists():
        raise CannotStart(f"{target} exists: name a file that does not, or move it away.")
    if not target.parent.is_dir():
        raise CannotStart(f"There is no folder {target.parent}: make it, or name another file.")
    if not (home.settings.exists() and (configuration.database_url or home.postgres.exists())):
        raise CannotStart(f"Nothing ever ran in {home.path}: set SWITCHYARD_HOME to the home of a control plane.")
    home.secrets()


def _write(home: StateDirectory, scratch: Path, target: Path) -> int:
    """The dump in `scratch` with the secrets, as one file; returns its bytes."""
    fresh = scratch / "backup.tar"
    with tarfile.open(fresh, "w") as archive:
        _add(archive, MANIFEST, json.dumps(_manifest()).encode())
        for name in SECRETS:
            if (home.path / name).exists():
                _add(archive, name, (home.path / name).read_bytes())
        archive.add(scratch / DUMP, DUMP)
    fresh.chmod(0o600)
    fresh.rename(target)
    return target.stat().st_size


async def restore(configuration: Configuration, home: StateDirectory, source: Path, console: Console) -> None:
    """Restore a backup into a home where nothing ever ran. After a failure the home is empty again. Raises CannotStart
    if the home or its database is in use, `source` is no backup, or PostgreSQL refused it."""
    if home.settings.exists() or home.postgres.exists():
        raise CannotStart(f"{home.path} is a home already: set SWITCHYARD_HOME to a folder that does not exist yet.")
    with _scratch(home.path) as scratch:
        secrets = _read(source, scratch / DUMP)
        made = [home.path / name for name in secrets]
        try:
            for name, content in secrets.items():
                with os.fdopen(os.open(home.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(content)
            home.secrets()
            async with _owner_url(configuration, home, console) as url:
                _require_empty(url)
                with console.step(f"restoring {source}"):
                    # Whose everything is, and who may what, follows from where it is restored (grant_application).
                    options = ["--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges"]
                    await _run("pg_restore", [*options, str(scratch / DUMP)], url, home, console)
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            shutil.rmtree(home.postgres, ignore_errors=True)
            raise
    console.own(f"restored into {home.path}; `make up` starts it")


@asynccontextmanager
async def _owner_url(configuration: Configuration, home: StateDirectory, console: Console) -> AsyncIterator[str]:
    """Where the owner finds the database: of servers that run already, or that run for this alone."""
    state = home.read_state()
    if configuration.database_url or (home.is_locked() and state and state.owner_url):
        yield configuration.database_url or (state.owner_url if state else "")
        return
    postgres = choose_servers(configuration, home).postgres
    if postgres is None:
        raise CannotStart("There is no database: set DATABASE_URL, or neither that nor REDIS_URL.")
    supervisor = Supervisor(home, console, on_change=lambda _: None)
    try:
        with console.step("PostgreSQL"):
            await postgres.initialise(os.environ, console)
            await supervisor.start(postgres.service(os.environ))
            await postgres.wait_until_ready()
        yield postgres.owner_url
    finally:
        await supervisor.stop_all()
        remove_socket_folder(socket_folder(home.path))


@contextmanager
def _scratch(beside: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=beside) as folder:
        yield Path(folder)


def _manifest() -> Mapping[str, object]:
    return {"format": FORMAT, "made_at": datetime.now(UTC).isoformat(timespec="seconds")}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o600
    archive.addfile(entry, io.BytesIO(content))


def _read(source: Path, dump: Path) -> dict[str, bytes]:
    """The secrets of a backup; its dump goes to the file `dump`. Raises CannotStart if it is none, or of another
    format."""
    try:
        with tarfile.open(source, "r:") as archive:
            names = archive.getnames()
            known = {MANIFEST, DUMP, SECRETS[0]} <= set(names) <= {MANIFEST, DUMP, *SECRETS}
            if not known or len(names) != len(set(names)) or not all(member.isfile() for member in archive):
                raise CannotStart(f"{source} is no backup of Switchyard: it holds {', '.join(names[:5]) or 'nothing'}.")
            stated = json.loads(_small(archive, MANIFEST)).get("format")
            if stated != FORMAT:
                raise CannotStart(
                    f"{source} has format {stated!r} and this release reads {FORMAT}: use the one that made it."
                )
            with dump.open("wb") as file:
                shutil.copyfileobj(_content(archive, DUMP), file)
            return {name: _small(archive, name) for name in SECRETS if name in names}
    except (OSError, tarfile.TarError, ValueError, AttributeError) as error:
        raise CannotStart(f"{source} cannot be read as a backup: {error}.") from error


def _content(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    content = archive.extractfile(name)
    if content is None:
        raise ValueError(f"{name} in it is no file")
    return content


def _small(archive: tarfile.TarFile, name: str) -> bytes:
    read = _content(archive, name).read(_MAX_SMALL_BYTES + 1)
    if not 0 < len(read) <= _MAX_SMALL_BYTES:
        raise ValueError(f"{name} in it is empty or too long")
    return read


def _require_empty(url: str) -> None:
    """Raises CannotStart if the database has tables, which a restore would mix with its own."""
    import psycopg

    with psycopg.connect(url) as connection:
        tables = count_tables(connection)
    if tables:
        raise CannotStart(f"{without_password(url)} has {tables} tables: restore into an empty database.")


async def _run(name: str, options: list[str], url: str, home: StateDirectory, console: Console) -> None:
    """One of PostgreSQL's programs on the database at `url`, whose password is in no command line."""
    password = unquote(urlsplit(url).password or "")
    database = without_password(url).replace(":***@", "@", 1)
    environment = {**os.environ, **({"PGPASSWORD": password} if password else {})}
    program = Program((str(binaries() / name), f"--dbname={database}", *options), environment, home.path)
    await require_oneshot(name, program, home, console, deadline_s=_LIMIT_S)
