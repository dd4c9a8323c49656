"""Whether a connection works: known without asking where it just did, and never believed of one that has ended."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, connection, connections
from django.db.backends.postgresql import base

from kernel.clock import DatabaseClock
from kernel.postgresql.base import DatabaseWrapper
from tests.controlplane.embedded.processes import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def other() -> Iterator[DatabaseWrapper]:
    database: Any = connections.create_connection(DEFAULT_DB_ALIAS)
    database.ensure_connection()
    yield database
    database.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The results of Django's connection tests."""
    answers: list[bool] = []
    ask = base.DatabaseWrapper.is_usable

    def noted(database: Any) -> bool:
        answers.append(ask(database))
        return answers[-1]

    monkeypatch.setattr(base.DatabaseWrapper, "is_usable", noted)
    return answers


def test_one_that_worked_a_moment_ago_is_not_asked(other: DatabaseWrapper, asked: list[bool]) -> None:
    assert other.is_usable()
    assert asked == []


def test_one_that_rested_is_asked(other: DatabaseWrapper, asked: list[bool]) -> None:
    other.connection.exchanged_s -= 60.0
    assert other.is_usable()
    assert asked == [True]
    assert other.is_usable()  # by the answer to that
    assert asked == [True]


def test_a_check_compares_the_clocks_if_that_is_due(other: DatabaseWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    own = DatabaseClock(ticks_s=lambda: 0.0)
    monkeypatch.setattr("kernel.clock.DATABASE_CLOCK", own)
    assert other.is_usable()
    assert not own.is_due
    other.set_autocommit(False)
    own = DatabaseClock(ticks_s=lambda: 0.0)
    monkeypatch.setattr("kernel.clock.DATABASE_CLOCK", own)
    with other.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert other.is_usable()
    assert own.is_due  # no query in another transaction


def test_one_whose_server_hung_up_is_not_believed(other: Any) -> None:
    process = other.connection.info.backend_pid
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [process])
        assert cursor.fetchone() == (True,)
    assert eventually(lambda: not other.connection.is_fresh)  # the close arrives asynchronously
    assert not other.is_usable()
    other.health_check_enabled, other.health_check_done = True, False
    with other.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,), "it was not replaced"
