"""The real servers, from nothing to their end. The session's own servers already proved that a start succeeds."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from controlplane.embedded.postgres import APPLICATION, OWNER
from controlplane.embedded.privileges import socket_folder
from controlplane.embedded.process_ownership import processes_of
from tests.controlplane.embedded.processes import eventually
from tests.embedded_servers import EmbeddedServers

pytestmark = pytest.mark.processes


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return (tmp_path / "home").resolve()


@pytest.fixture
def servers(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServers]:
    monkeypatch.delenv("DATABASE_URL")
    monkeypatch.delenv("REDIS_URL")
    servers = EmbeddedServers(home)
    yield servers
    servers.stop()


def _kill(servers: EmbeddedServers, home: Path) -> None:
    psutil.Process(servers.pid).kill()
    servers.stop()
    assert eventually(lambda: not processes_of(home))


def test_they_answer_and_leave_nothing(servers: EmbeddedServers, home: Path) -> None:
    urls = servers.start()
    with psycopg.connect(urls["database_url"]) as connection:
        encoding = connection.execute("SHOW server_encoding").fetchone()
        listens = connection.execute("SHOW listen_addresses").fetchone()
    assert (encoding, listens) == (("UTF8",), ("",))
    with redis.Redis.from_url(urls["redis_url"]) as client:
        assert client.config_get("port") == {"port": "0"}
    servers.stop()
    assert processes_of(home) == []
    assert not socket_folder(home).exists()


def test_the_application_is_a_role_that_owns_nothing_also_in_a_cluster_of_before(servers: EmbeddedServers) -> None:
    url = servers.start()["database_url"]
    application = url.replace(f"{OWNER}@", f"{APPLICATION}@")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP ROLE {APPLICATION}")  # as it was
    servers.stop()
    servers.start()
    with psycopg.connect(application) as connection:
        roles = (
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
        )
        assert connection.execute(roles).fetchone() == (False,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE mine (id int)")


def test_they_end_when_their_parent_is_killed_and_start_again_with_what_they_stored(
    servers: EmbeddedServers, home: Path
) -> None:
    urls = servers.start()
    with psycopg.connect(urls["database_url"], autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    _kill(servers, home)
    with psycopg.connect(servers.start()["database_url"]) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_stale_files_of_dead_servers_do_not_stop_them(servers: EmbeddedServers, home: Path) -> None:
    servers.start()
    _kill(servers, home)
    sockets = socket_folder(home)
    sockets.mkdir(exist_ok=True)
    (sockets / "valkey.sock").write_text("")
    (sockets / ".s.PGSQL.5432").write_text("")
    # A number that lives but is no PostgreSQL: what a reboot leaves.
    stale = f"{os.getpid()}\n{home / 'pg'}\n1700000000\n5432\n{sockets}\n\n\nready\n"
    (home / "pg" / "postmaster.pid").write_text(stale)
    (sockets / ".s.PGSQL.5432.lock").write_text(stale)
    urls = servers.start()
    with psycopg.connect(urls["database_url"]) as connection, redis.Redis.from_url(urls["redis_url"]) as client:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        assert client.ping()


def test_a_session_that_hangs_keeps_no_server_down(servers: EmbeddedServers, home: Path) -> None:
    url = servers.start()["database_url"]
    with psycopg.connect(url) as connection:
        hung = connection.info.backend_pid
        os.kill(hung, signal.SIGSTOP)  # as one in an uninterruptible wait: it hears of no end
        postmaster = int((home / "pg" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)

        def answers() -> bool:
            try:
                with psycopg.connect(url, connect_timeout=2) as fresh:
                    return fresh.execute("SELECT 1").fetchone() == (1,)
            except psycopg.OperationalError:
                return False

        assert eventually(lambda: not psutil.pid_exists(postmaster))
        assert eventually(answers)
    assert not psutil.pid_exists(hung)


def test_a_server_that_dies_is_back_with_its_data(servers: EmbeddedServers, home: Path) -> None:
    urls = servers.start()
    postmaster = int((home / "pg" / "postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGKILL)

    def answers() -> bool:
        try:
            with psycopg.connect(urls["database_url"]) as connection:
                return connection.execute("SELECT pg_postmaster_start_time()").fetchone() is not None
        except psycopg.OperationalError:
            return False

    assert eventually(lambda: not psutil.pid_exists(postmaster))
    assert eventually(answers)
