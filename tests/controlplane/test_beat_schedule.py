"""Beat starts whatever became of its schedule file, and of several beats one asks."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError

from controlplane.celery import BEAT_LEASE, BEAT_LEASE_S, LEADS_FOR_S, MendingScheduler, app
from kernel import clock, leases
from kernel.models import Lease


def started(folder: Path) -> set[str]:
    """The names that a beat with a file in this folder asks for."""
    scheduler = MendingScheduler(app, schedule_filename=str(folder / "beat-schedule"))
    names = set(scheduler.schedule)
    scheduler.close()
    return names


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_schedule_file_that_was_cut_off_is_replaced(tmp_path: Path, kept: float) -> None:
    wanted = started(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.suffix not in {".dir", ".bak"}]
    assert files
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept)])
    assert started(tmp_path) == wanted


class Beat(MendingScheduler):
    """On a host of this name; notes what it asks for."""

    def __init__(self, host: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(app, schedule_filename=str(folder / host))
        self.asked: list[str] = []
        self._host, self._monkeypatch = host, monkeypatch

    def apply_async(self, entry: Any, *_: Any, **__: Any) -> None:
        self.asked.append(entry.name)

    def ask_for_all(self) -> int:
        self.asked.clear()
        self._leads_until_s = 0.0  # as after `LEADS_FOR_S`
        self._monkeypatch.setattr(leases, "this_holder", lambda: self._host)
        for entry in self.schedule.values():
            self.apply_entry(entry)
        return len(self.asked)


@pytest.mark.django_db
def test_of_several_beats_one_asks_and_another_once_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django.db.close_old_connections", lambda: None)  # the test's transaction is on one
    one, other = (Beat(host, tmp_path, monkeypatch) for host in ("one", "other"))
    everything = len(one.schedule)
    assert [one.ask_for_all(), other.ask_for_all(), one.ask_for_all()] == [everything, 0, everything]
    Lease.objects.filter(name=BEAT_LEASE).update(expires_at=clock.now() - timedelta(seconds=1))
    assert [other.ask_for_all(), one.ask_for_all()] == [everything, 0]
    one.close()
    other.close()


@pytest.mark.django_db  # another test may have left a connection that it looks after
def test_a_beat_without_its_database_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> int:
        raise OperationalError("away")

    monkeypatch.setattr(leases, "lease_take", refuse)
    beat = Beat("one", tmp_path, monkeypatch)
    assert beat.ask_for_all() == len(beat.schedule)
    beat.close()


@pytest.mark.django_db
def test_what_is_due_in_one_second_takes_the_lease_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.db.close_old_connections", lambda: None)  # the test's transaction is on one
    now_s, taken = [1000.0], list[float]()

    def take(**_: object) -> int:
        taken.append(now_s[0])
        return 1

    monkeypatch.setattr("controlplane.celery.monotonic", lambda: now_s[0])
    monkeypatch.setattr(leases, "lease_take", take)
    beat = Beat("one", tmp_path, monkeypatch)
    assert beat.ask_for_all() == len(beat.schedule)
    assert taken == [1000.0]
    now_s[0] += LEADS_FOR_S
    beat.ask_for_all()
    assert taken == [1000.0, 1000.0 + LEADS_FOR_S]
    beat.close()


def test_a_beat_that_runs_asks_for_all_of_its_table_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.celery._is_leading_beat", lambda: True)
    beat = Beat("one", tmp_path, monkeypatch)
    for entry in beat.schedule.values():
        entry.last_run_at = clock.now() - timedelta(days=1)
    pauses = [beat.tick() for _ in beat.schedule]
    assert pauses == [0] * len(beat.schedule)
    assert sorted(beat.asked) == sorted(beat.schedule)
    assert beat.tick() > 0
    beat.close()


def test_the_lease_outlives_the_pause_between_two_messages() -> None:
    shortest_s = min(float(entry["schedule"]) for entry in app.conf.beat_schedule.values())
    assert shortest_s * 2 + LEADS_FOR_S <= BEAT_LEASE_S
