"""The control plane's time is PostgreSQL's, regardless of the host's clock, and advances between two comparisons."""

from datetime import UTC, datetime, timedelta
from time import monotonic

import pytest
from django.db import connection

from kernel import clock
from kernel.clock import COMPARE_EVERY_S, DatabaseClock
from kernel.leases import lease_take

TRUTH = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


class Host:
    """A host whose wall clock is `askew_s` off. Its monotonic clock is right, as they are."""

    def __init__(self, askew_s: float) -> None:
        self.askew_s = askew_s
        self.ticks_s = 1000.0
        self.clock = DatabaseClock(wall=self.wall, ticks_s=lambda: self.ticks_s)

    def wall(self) -> datetime:
        return self.truth() + timedelta(seconds=self.askew_s)

    def truth(self) -> datetime:
        return TRUTH + timedelta(seconds=self.ticks_s - 1000.0)

    def compare(self, *, round_trip_s: float = 0.0) -> None:
        def read() -> datetime:
            self.ticks_s += round_trip_s / 2
            moment = self.truth()
            self.ticks_s += round_trip_s / 2
            return moment

        self.clock.compare(read)


@pytest.mark.parametrize("askew_s", [-300.0, -3.0, -2.0, 0.0, 2.0, 3.0, 300.0])
def test_a_host_whose_clock_is_wrong_has_the_databases_time(askew_s: float) -> None:
    host = Host(askew_s)
    host.compare()
    host.ticks_s += 7.0
    assert host.clock.now() == host.truth()


def test_a_clock_that_is_set_while_a_process_runs_changes_nothing() -> None:
    host = Host(0.0)
    host.compare()
    host.askew_s = -300.0
    host.ticks_s += 1.0
    assert host.clock.now() == host.truth()


def test_without_a_database_the_host_knows_best() -> None:
    assert Host(2.0).clock.now() == TRUTH + timedelta(seconds=2.0)


def test_a_slow_comparison_does_not_replace_a_good_one() -> None:
    host = Host(2.0)
    host.compare()

    def slow() -> datetime:
        moment = host.truth()
        host.ticks_s += 5.0
        return moment

    host.clock.compare(slow)
    assert host.clock.now() == host.truth()


def test_clocks_are_compared_once_in_a_while() -> None:
    host = Host(0.0)
    due = [host.clock.is_due]
    host.compare()
    due.append(host.clock.is_due)
    host.ticks_s += COMPARE_EVERY_S
    assert [*due, host.clock.is_due] == [True, False, True]


def test_a_reading_that_fails_is_not_tried_again_at_once() -> None:
    host = Host(2.0)

    def fails() -> datetime:
        raise OSError("the database is gone")

    with pytest.raises(OSError, match="gone"):
        host.clock.compare(fails)
    assert not host.clock.is_due
    host.compare()
    assert host.clock.now() == host.truth()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("askew_s", [-2.0, 2.0])
def test_a_worker_whose_clock_is_askew_takes_no_lease_from_others_and_loses_none(
    askew_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    askew = DatabaseClock(wall=lambda: datetime.now(UTC) + timedelta(seconds=askew_s), ticks_s=monotonic)
    monkeypatch.setattr("kernel.clock.DATABASE_CLOCK", askew)
    connection.close()
    connection.ensure_connection()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        (truth,) = cursor.fetchone()
    assert abs((clock.now() - truth).total_seconds()) < 1.0
    assert lease_take(name="job", holder="right", ttl_s=1.5, now=truth) == 1
    assert lease_take(name="job", holder="askew", ttl_s=1.5, now=clock.now()) is None
