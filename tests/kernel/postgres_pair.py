"""A PostgreSQL and its synchronous standby, for tests: on Unix sockets, gone with the process that started them."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg

from controlplane.embedded.postgres import OWNER, binaries
from controlplane.embedded.privileges import server_account
from controlplane.embedded.processes import Program, guarded, server_environment
from tests.controlplane.embedded.processes import eventually

_COMMAND_LIMIT_S = 120.0
_FAST = ("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "listen_addresses=", "-c", "max_connections=60")
Server = subprocess.Popen[bytes]


class PostgresPair:
    """`primary` and `standby` until `promote`; every commit of the primary waits for the standby."""

    def __init__(self, folder: Path) -> None:
        self._account = server_account()
        self._folder = folder
        self._running: dict[str, Server] = {}
        for name in ("a", "b"):
            (folder / name).mkdir(mode=0o700)
            self._give(folder / name)
        self._run("initdb", "-D", str(self._data("a")), "-U", OWNER, "-A", "trust", "--no-sync", "--locale=C")
        self._serve("a")
        self._run("pg_basebackup", "-D", str(self._data("b")), "-R", "-c", "fast", "-h", self.host("a"), "-U", OWNER)
        self._serve("b")
        self.sql("a", "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.sql("a", "SELECT pg_reload_conf()")
        self.sql("a", f"CREATE DATABASE {OWNER}")

    def host(self, name: str) -> str:
        """The folder of its sockets: what libpq takes for a host."""
        return str(self._folder / name)

    @property
    def url(self) -> str:
        """Names both, the first one first."""
        return f"postgres://{OWNER}@{quote(self.host('a'), safe='')},{quote(self.host('b'), safe='')}/{OWNER}"

    def sql(self, name: str, statement: str) -> None:
        """Run a statement on one of them."""
        with psycopg.connect(f"host={self.host(name)} user={OWNER} dbname=postgres", autocommit=True) as connection:
            connection.execute(statement)

    def kill(self, name: str) -> None:
        server = self._running.pop(name)
        # Backends have their own sessions, and one could still serve a query after the kill.
        backends = psutil.Process(server.pid).children(recursive=True)
        os.killpg(server.pid, signal.SIGKILL)
        for backend in backends:
            with suppress(psutil.NoSuchProcess):
                backend.kill()
        psutil.wait_procs(backends, timeout=_COMMAND_LIMIT_S)
        server.wait()

    def promote(self) -> None:
        """Have the standby take writes; returns when it does."""
        self.sql("b", "SELECT pg_promote(wait => true, wait_seconds => 60)")
        self.sql("b", "ALTER SYSTEM RESET synchronous_standby_names")
        self.sql("b", "SELECT pg_reload_conf()")

    def cancel_wait_for_standby(self) -> None:
        """Cancel the next commit that waits for the standby."""
        cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        with psycopg.connect(f"host={self.host('a')} user={OWNER} dbname=postgres", autocommit=True) as connection:
            eventually(lambda: connection.execute(cancel).fetchone() is not None, within_s=_COMMAND_LIMIT_S)

    def stop(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def _serve(self, name: str) -> None:
        arguments = ("postgres", "-D", str(self._data(name)), "-k", self.host(name), *_FAST)
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                self._command(*arguments), stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        self._run("pg_isready", "-h", self.host(name), "-U", OWNER, "-d", "postgres", until_it_succeeds=True)

    def _run(self, *arguments: str, until_it_succeeds: bool = False) -> None:
        command = self._command(*arguments)
        while True:
            ended = subprocess.run(
                command,
                env=self._environment,
                capture_output=True,
                timeout=_COMMAND_LIMIT_S,
                check=not until_it_succeeds,
            )
            if ended.returncode == 0:
                return
            assert all(server.poll() is None for server in self._running.values()), "a server has ended"

    def _command(self, program: str, *arguments: str) -> list[str]:
        account = self._account.drop
        return guarded(
            Program((str(binaries() / program), *arguments), {}, self._folder, account=account, traverse=bool(account))
        )

    @property
    def _environment(self) -> dict[str, str]:
        return server_environment(os.environ, self._folder)

    def _data(self, name: str) -> Path:
        return self._folder / name / "data"

    def _give(self, folder: Path) -> None:
        if self._account.drop:
            shutil.chown(folder, self._account.uid, self._account.gid)
