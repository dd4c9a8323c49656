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
from lab.embedded_servers import EmbeddedServers
from tests.controlplane.embedded.processes import eventually

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


def test_they_answer_and_leave_nothing_and_the_application_owns_nothing_also_in_a_cluster_of_before(
    servers: EmbeddedServers, home: Path
) -> None:
    urls = servers.start()
    with psycopg.connect(urls["database_url"], autocommit=True) as connection:
        encoding = connection.execute("SHOW server_encoding").fetchone()
        listens = connection.execute("SHOW listen_addresses").fetchone()
        connection.execute(f"DROP ROLE {APPLICATION}")  # as it was
    assert (encoding, listens) == (("UTF8",), ("",))
    with redis.Redis.from_url(urls["redis_url"]) as client:
        assert client.config_get("port") == {"port": "0"}
    servers.stop()
    assert processes_of(home) == []
    assert not socket_folder(home).exists()
    application = servers.start()["database_url"].replace(f"{OWNER}@", f"{APPLICATION}@")
    with psycopg.connect(application) as connection:
        roles = (
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
        )
        assert connection.execute(roles).fetchone() == (False,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE mine (id int)")


def test_they_end_when_their_parent_is_killed_and_start_again_with_what_they_stored_beside_stale_files(
    servers: EmbeddedServers, home: Path
) -> None:
    urls = servers.start()
    with psycopg.connect(urls["database_url"], autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    _kill(servers, home)
    with psycopg.connect(servers.start()["database_url"]) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
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
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
        assert client.ping()


def test_a_server_that_dies_is_back_with_its_data_also_when_a_session_hangs(
    servers: EmbeddedServers, home: Path
) -> None:
    url = servers.start()["database_url"]

    def answers() -> bool:
        try:
            with psycopg.connect(url, connect_timeout=2) as fresh:
                return fresh.execute("SELECT answer FROM kept").fetchone() == (42,)
        except psycopg.OperationalError:
            return False

    def kill_postmaster() -> None:
        postmaster = int((home / "pg" / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)
        assert eventually(lambda: not psutil.pid_exists(postmaster))

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        connection.execute("CHECKPOINT")  # what is not durable survives from there on
    kill_postmaster()
    assert eventually(answers)
    with psycopg.connect(url) as connection:
        hung = connection.info.backend_pid
        os.kill(hung, signal.SIGSTOP)  # like a process in an uninterruptible wait
        kill_postmaster()
        assert eventually(answers)
    assert not psutil.pid_exists(hung)
