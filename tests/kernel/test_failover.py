"""A database of two hosts: the one that takes writes is found, and nothing is acknowledged that its loss would undo."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections

from kernel.postgresql.base import DatabaseWrapper, PrimaryConnection
from kernel.process_role import ProcessRole, connection_options, database_settings
from tests.kernel.postgres_pair import PostgresPair

pytestmark = pytest.mark.processes


@pytest.fixture
def pair(django_db_blocker: Any) -> Iterator[PostgresPair]:
    folder = Path(tempfile.mkdtemp(prefix="pair-"))  # short: a socket's path may have no more than 107 bytes
    servers = PostgresPair(folder)
    with django_db_blocker.unblock():  # the tests' own database is not touched
        yield servers
    servers.stop()
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _nothing_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrimaryConnection, "answered", ("", ""))


def wrapper(pair: PostgresPair, **pool: Any) -> DatabaseWrapper:
    stated = database_settings(pair.url)
    options = {**connection_options({}, ProcessRole.WEB, has_standby=True), **stated["OPTIONS"], **pool}
    settings = {**connections.settings[DEFAULT_DB_ALIAS], **stated, "CONN_MAX_AGE": 0, "OPTIONS": options}
    return DatabaseWrapper(settings, "pair")


def write(database: DatabaseWrapper, text: str) -> None:
    with database.cursor() as cursor:
        cursor.execute("INSERT INTO kept VALUES (%s)", [text])


def host_of(database: DatabaseWrapper) -> str:
    database.ensure_connection()
    return str(database.connection.info.host)


def test_writes_go_on_where_the_standby_was_promoted_and_what_was_acknowledged_is_there(pair: PostgresPair) -> None:
    database, pooled = wrapper(pair), wrapper(pair, pool={"min_size": 1, "max_size": 2, "timeout": 10})
    with database.cursor() as cursor:
        cursor.execute("CREATE TABLE kept (text text)")
    for number in range(20):
        write(database, f"{number}")
    assert host_of(database) == host_of(pooled) == pair.host("a")
    pair.kill("a")
    with pytest.raises(OperationalError):
        write(database, "nobody took it")
    database.close()
    with pytest.raises(OperationalError):
        database.ensure_connection()  # the standby takes no writes yet
    pair.promote()
    write(database, "after")
    with database.cursor() as cursor:
        cursor.execute("SELECT text FROM kept")
        assert {text for (text,) in cursor.fetchall()} == {*map(str, range(20)), "after"}
    assert host_of(database) == pair.host("b")
    pooled.close()
    write(pooled, "by the pool, which hands out no connection that is dead")
    assert PrimaryConnection.answered[0] == pair.host("b")
    pooled.close()
    pooled.close_pool()
    database.close()


def test_a_commit_whose_wait_for_the_standby_is_cancelled_is_no_success(pair: PostgresPair) -> None:
    database = wrapper(pair)
    with database.cursor() as cursor:
        cursor.execute("CREATE TABLE kept (text text)")
    pair.kill("b")
    with cancelled_wait(pair), pytest.raises(OperationalError, match="not known to be on the standby"):
        write(database, "by itself")
    database.set_autocommit(False)
    write(database, "in a transaction")
    with cancelled_wait(pair), pytest.raises(OperationalError, match="not known to be on the standby"):
        database.commit()
    database.rollback()
    with database.cursor() as cursor:  # nothing is remembered of a warning
        cursor.execute("SELECT count(*) FROM kept")
        assert cursor.fetchone() == (2,)
    database.close()


@contextmanager
def cancelled_wait(pair: PostgresPair) -> Iterator[None]:
    """Cancels a commit that waits for a missing standby, as an administrator would."""
    thread = threading.Thread(target=pair.cancel_wait_for_standby)
    thread.start()
    yield
    thread.join()
