"""A control loop's backend at PostgreSQL waits behind nothing that the loop does not wait behind."""

import os
from pathlib import Path

import pytest
from django.db import connection

from kernel import process_role
from kernel.process_role import backend_place, own_session_nice


def place_of_backend() -> str:
    """Of the session of a new connection's backend; empty where the kernel does not share by session."""
    connection.close()
    connection.ensure_connection()
    place = Path(f"/proc/{connection.connection.info.backend_pid}/autogroup")
    return place.read_text().partition(" ")[2].strip() if place.exists() else ""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_role, "_placed", set())


@pytest.mark.django_db(transaction=True)
def test_the_backend_of_a_process_that_goes_before_others_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_role, "own_session_nice", lambda: 0)
    as_it_was = place_of_backend()
    assert as_it_was in {"", "nice 0"}
    monkeypatch.setattr(process_role, "own_session_nice", lambda: -5)
    assert place_of_backend() == ("nice -5" if as_it_was and os.geteuid() == 0 else as_it_was), "only root may do it"
    monkeypatch.setattr(process_role, "own_session_nice", lambda: 0)
    assert place_of_backend() == as_it_was
    connection.close()


@pytest.mark.parametrize("host", ["db.example", "127.0.0.1"])
def test_what_is_no_backend_of_this_host_is_left_alone(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(process_role, "own_session_nice", lambda: -5)
    backend_place(os.getpid(), host)
    assert not process_role._placed


def test_a_process_knows_the_place_of_its_session() -> None:
    assert -20 <= own_session_nice() <= 19
