"""How two control hosts and their database are, and what of that somebody must know."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from controlplane.embedded.host_records import DatabaseClient
from controlplane.embedded.replication import Commits, Standby
from kernel.control_hosts import LAGS_AFTER_S, SILENT_AFTER_S, ControlHosts, ControlHostStanding, control_hosts
from kernel.models import ControlHost

SEEN = datetime(2026, 11, 23, 20, 30, 5, tzinfo=timezone(timedelta(hours=1)))
PRIMARY = ControlHostStanding("control-1", "10.0.0.1", "primary", "synchronous", None, None, SEEN, 0.5, 60.0)
STANDBY = ControlHostStanding("control-2", "10.0.0.2", "standby", "", 0, 0.0, SEEN, 0.5, None)


def test_two_that_are_well_say_so_in_one_line() -> None:
    hosts = ControlHosts((PRIMARY, STANDBY))
    assert str(hosts) == "control-1 primary, control-2 standby, 0.0 s behind; commits wait for the standby"
    assert (hosts.problems, hosts.is_synchronous) == ({}, True)


def test_a_control_plane_of_one_host_says_nothing() -> None:
    assert (str(ControlHosts(())), ControlHosts(()).problems) == ("", {})


@pytest.mark.parametrize(
    ("hosts", "subject", "expected"),
    [
        (
            (PRIMARY, replace(STANDBY, silent_s=SILENT_AFTER_S + 1)),
            "control-2",
            "at 10.0.0.2 has not been heard since 2026-11-23 19:30:05 UTC",
        ),
        ((replace(PRIMARY, commits="asynchronous"), STANDBY), "standby", "would be lost with control-1"),
        ((PRIMARY, replace(STANDBY, lag_s=LAGS_AFTER_S + 2)), "lag", "control-2 is more than 10 s behind"),
    ],
)
def test_what_is_wrong_is_named(hosts: tuple[ControlHostStanding, ...], subject: str, expected: str) -> None:
    problems = ControlHosts(hosts).problems
    assert set(problems) == {subject}
    assert expected in problems[subject]


def test_one_that_is_silent_says_since_when() -> None:
    silent = ControlHosts((PRIMARY, replace(STANDBY, silent_s=6 * 3600.0)))
    assert "control-2 silent since 2026-11-23 19:30:05 UTC" in str(silent)


@pytest.mark.parametrize(
    "of", [lambda age_s: replace(STANDBY, silent_s=age_s), lambda age_s: replace(STANDBY, lag_s=age_s)]
)
def test_what_is_wrong_is_said_in_the_same_words_hours_later(of: Callable[[float], ControlHostStanding]) -> None:
    """An incident keeps the sentence with which it was opened."""
    early, late = (ControlHosts((PRIMARY, of(age_s))).problems for age_s in (23.0, 6 * 3600.0))
    assert early == late


@pytest.mark.django_db(transaction=True)
def test_what_launchers_write_is_what_pages_read() -> None:
    """The launcher knows the table by its name alone."""
    from django.db import connection

    parameters = connection.get_connection_params()
    wanted = {
        name: str(parameters[name]) for name in ("host", "user", "dbname", "port", "password") if name in parameters
    }
    client = DatabaseClient("", **wanted)
    host = type("Host", (), {"name": "control-1", "address": "10.0.0.1", "agent_url": "https://10.0.0.1:8443"})
    other = type("Host", (), {"name": "control-2", "address": "10.0.0.2", "agent_url": "https://10.0.0.2:8443"})
    try:
        assert client.note_alive(host, "primary") is False  # type: ignore[arg-type]
        client.note_alive(other, "standby")  # type: ignore[arg-type]
        client.note_commits("control-1", Commits.SYNCHRONOUS, 15.0)
        client.note_standby("control-2", Standby(4096, 0.25, True, 0.0), is_reached=True)
        first, second = control_hosts().hosts
        assert (first.database, first.commits, second.lag_bytes, second.lag_s) == ("primary", "synchronous", 4096, 0.25)
        record = client.primary_record()
        assert record is not None
        assert (record.name, record.alone_after_s) == ("control-1", 15.0)
        client.note_standby("control-2", None, is_reached=False)
        assert control_hosts().hosts[1].lag_bytes is None
        ControlHost.objects.filter(name="control-1").update(stands_down=True)
        assert client.note_alive(host, "primary") is True  # type: ignore[arg-type]
        assert ControlHost.objects.get(name="control-2").reached_at <= datetime.now(UTC)  # type: ignore[operator]
    finally:
        client.close()
