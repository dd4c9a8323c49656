"""Backup and restore with a real PostgreSQL, and files that are no backups."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from controlplane.embedded import backup
from controlplane.embedded.backup import DUMP, MANIFEST, back_up, restore
from controlplane.embedded.configuration import CannotStart, Configuration, read_configuration
from controlplane.embedded.process_ownership import processes_of
from controlplane.embedded.processes import Program
from controlplane.embedded.state_directory import StateDirectory
from tests.controlplane.embedded.processes import prepared_home, silent_console

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]


def configured(home: StateDirectory, **environment: str) -> Configuration:
    return read_configuration({"SWITCHYARD_HOME": str(home.path), **environment})


async def run_sql(home: StateDirectory, statement: str) -> list[Any]:
    """On the server of a home, which runs for this alone."""
    async with backup._owner_url(configured(home), home, silent_console()) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            answer = connection.execute(statement)
            return answer.fetchall() if answer.description else []


def scan(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_another_home_has_the_same_database_and_secrets_and_nothing_runs_after(tmp_path: Path) -> None:
    home, other, file = prepared_home(tmp_path / "a"), prepared_home(tmp_path / "b"), tmp_path / "backup.tar"
    secrets = home.secrets()
    home.token.write_text("the operator's token")
    await run_sql(home, "CREATE TABLE kept AS SELECT 42 AS answer")
    await back_up(configured(home), home, file, silent_console())
    assert file.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in scan(tmp_path)} == {"a", "b", file.name}
    await restore(configured(other), other, file, silent_console())
    assert await run_sql(other, "SELECT answer FROM kept") == [(42,)]
    assert (other.secrets(), other.token.read_text()) == (secrets, "the operator's token")
    assert other.token.stat().st_mode & 0o777 == 0o600
    assert processes_of(home.path) == processes_of(other.path) == []
    with pytest.raises(CannotStart, match="exists: name a file that does not"):
        await back_up(configured(home), home, file, silent_console())
    with pytest.raises(CannotStart, match="is a home already"):
        await restore(configured(other), other, file, silent_console())


async def test_a_restore_that_fails_leaves_the_home_as_empty_as_it_was(tmp_path: Path) -> None:
    home = prepared_home(tmp_path / "a")
    with pytest.raises(CannotStart, match="pg_restore failed"):
        await restore(configured(home), home, archive(tmp_path, dump=b"no dump"), silent_console())
    assert not home.settings.exists()
    assert not home.postgres.exists()
    assert processes_of(home.path) == []


def archive(folder: Path, *, names: tuple[str, ...] = (), manifest: object = None, dump: bytes = b"x") -> Path:
    """A backup that differs from a good one in what is given."""
    file = folder / "given.tar"
    settings = json.dumps({"secret_key": "k", "operator_password": "p"}).encode()
    members = {MANIFEST: json.dumps(manifest or {"format": 1}).encode(), "settings.json": settings, DUMP: dump}
    with tarfile.open(file, "w") as tar:
        for name in names or tuple(members):
            content = members.get(name, b"other")
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return file


def link(folder: Path) -> Path:
    file = folder / "given.tar"
    with tarfile.open(archive(folder, names=(MANIFEST, "settings.json")), "a") as tar:
        entry = tarfile.TarInfo(DUMP)
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/shadow"
        tar.addfile(entry)
    return file


def junk(folder: Path) -> Path:
    file = folder / "given.tar"
    file.write_bytes(b"\x00junk" * 300)
    return file


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "nothing.tar", "cannot be read as a backup: .*No such file"),
        (junk, "cannot be read as a backup"),
        (lambda folder: archive(folder, names=(MANIFEST, "settings.json")), "is no backup of Switchyard"),
        (lambda folder: archive(folder, names=(MANIFEST, "settings.json", DUMP, "../x")), "is no backup"),
        (lambda folder: archive(folder, names=(MANIFEST, "settings.json", DUMP, DUMP)), "is no backup"),
        (lambda folder: archive(folder, manifest={"format": 2}), "has format 2 and this release reads 1"),
        (lambda folder: archive(folder, manifest=[1]), "cannot be read as a backup"),
        (link, "is no backup of Switchyard"),
    ],
)
async def test_what_is_no_backup_is_refused_by_what_is_wrong_with_it(
    tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    home = prepared_home(tmp_path / "home")
    with pytest.raises(CannotStart, match=says):
        await restore(configured(home), home, make(tmp_path), silent_console())
    assert not home.settings.exists()
    assert not home.postgres.exists()


async def test_a_home_where_nothing_ran_has_no_backup(tmp_path: Path) -> None:
    home = prepared_home(tmp_path / "home")
    with pytest.raises(CannotStart, match="Nothing ever ran in"):
        await back_up(configured(home), home, tmp_path / "backup.tar", silent_console())
    assert scan(home.path) == [home.logs]


async def test_a_password_of_the_database_is_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, programs = prepared_home(tmp_path / "home"), list[Program]()

    async def run(_name: str, program: Program, *_: object, **__: object) -> str:
        programs.append(program)
        raise CannotStart("not run")

    monkeypatch.setattr(backup, "require_oneshot", run)
    home.secrets()
    configuration = configured(home, DATABASE_URL="postgres://u:hid%2Fden@db1,db2/fleet")
    with pytest.raises(CannotStart, match="not run"):
        await back_up(configuration, home, tmp_path / "backup.tar", silent_console())
    assert "--dbname=postgres://u@db1,db2/fleet" in programs[0].arguments
    assert not any("hid" in argument for argument in programs[0].arguments)
    assert programs[0].environment["PGPASSWORD"] == "hid/den"
