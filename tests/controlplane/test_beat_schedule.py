"""Of several workers, one sends the tasks of housekeeping, each when it is due."""

from datetime import timedelta

import pytest
from django.db import OperationalError

from controlplane.celery import BEAT_LEASE, BEAT_LEASE_S, LEADS_FOR_S, HousekeepingSchedule, app
from kernel import clock, leases, wake_ups
from kernel.models import Lease


class Schedule(HousekeepingSchedule):
    """On a host of this name; notes what it sends."""

    def __init__(self, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(app)
        self.sent: list[tuple[str, float | None]] = []
        self._host, self._monkeypatch = host, monkeypatch
        monkeypatch.setattr(wake_ups, "send_task", self._send)

    def _send(self, task: str, arguments: dict[str, str], *, expires_s: float | None) -> None:
        self.sent.append((task, expires_s))

    def send_all(self) -> int:
        self.sent.clear()
        self._monkeypatch.setattr(wake_ups, "send_task", self._send)
        self._leads_until_s = 0.0  # as after `LEADS_FOR_S`
        self._monkeypatch.setattr(leases, "this_holder", lambda: self._host)
        for entry in self.schedule.values():
            self.apply_entry(entry)
        return len(self.sent)


@pytest.mark.django_db
def test_of_several_schedules_one_asks_and_another_once_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Schedule(host, monkeypatch) for host in ("one", "other"))
    everything = len(one.schedule)
    assert [one.send_all(), other.send_all(), one.send_all()] == [everything, 0, everything]
    Lease.objects.filter(name=BEAT_LEASE).update(expires_at=clock.now() - timedelta(seconds=1))
    assert [other.send_all(), one.send_all()] == [everything, 0]


@pytest.mark.django_db  # another test may have left a connection that it looks after
def test_a_schedule_without_its_database_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> int:
        raise OperationalError("away")

    monkeypatch.setattr(leases, "lease_take", refuse)
    schedule = Schedule("one", monkeypatch)
    assert schedule.send_all() == len(schedule.schedule)


@pytest.mark.django_db
def test_what_is_due_in_one_second_takes_the_lease_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, taken = [1000.0], list[float]()

    def take(**_: object) -> int:
        taken.append(now_s[0])
        return 1

    monkeypatch.setattr("controlplane.celery.monotonic", lambda: now_s[0])
    monkeypatch.setattr(leases, "lease_take", take)
    schedule = Schedule("one", monkeypatch)
    assert schedule.send_all() == len(schedule.schedule)
    assert taken == [1000.0]
    now_s[0] += LEADS_FOR_S
    schedule.send_all()
    assert taken == [1000.0, 1000.0 + LEADS_FOR_S]


def test_a_schedule_that_runs_asks_for_all_of_its_table_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.celery._is_leading_beat", lambda: True)
    schedule = Schedule("one", monkeypatch)
    for entry in schedule.schedule.values():
        entry.last_run_at = clock.now() - timedelta(days=1)
    pauses = [schedule.tick() for _ in schedule.schedule]
    assert pauses == [0] * len(schedule.schedule)
    assert sorted(task for task, _ in schedule.sent) == sorted(str(entry.task) for entry in schedule.schedule.values())
    assert schedule.tick() > 0


def test_the_lease_outlives_the_pause_between_two_messages() -> None:
    shortest_s = min(float(entry["schedule"]) for entry in app.conf.beat_schedule.values())
    assert shortest_s * 2 + LEADS_FOR_S <= BEAT_LEASE_S
