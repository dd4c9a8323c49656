"""Events: newest first, found by what they speak of."""

from datetime import timedelta
from typing import Any

import pytest

from kernel.models import Event
from tests.controlplane.api.client import bearer
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def event(**columns: Any) -> Event:
    return Event.objects.create(**{"at": NOW, "kind": "cell.ready", "tone": "ok", "message": "m", **columns})


def ids(**query: Any) -> list[int]:
    return [row["id"] for row in bearer().get("/api/v1/events", query).json()["results"]]


def test_an_event_says_everything_about_itself() -> None:
    row = event(region="us-east-1", deployment="d", cell="c", node="n", actor="ada", detail={"generation": 3})
    assert bearer().get(f"/api/v1/events/{row.id}").json() == {
        "id": row.id,
        "at": "2026-11-21T12:00:00Z",
        "kind": "cell.ready",
        "tone": "ok",
        "message": "m",
        "actor": "ada",
        "region": "us-east-1",
        "deployment": "d",
        "cell": "c",
        "node": "n",
        "detail": {"generation": 3},
    }


def test_the_newest_comes_first() -> None:
    first, second = event(), event()
    assert ids() == [second.id, first.id]


@pytest.mark.parametrize("field", ["kind", "actor", "region", "deployment", "cell", "node"])
def test_events_are_found_by_what_they_speak_of(field: str) -> None:
    wanted = event(**{field: "this"})
    event(**{field: "that"})
    assert ids(**{field: "this"}) == [wanted.id]


def test_several_tones_may_be_asked_for() -> None:
    bad, warn = event(tone="bad"), event(tone="warn")
    event(tone="ok")
    assert ids(tone=["bad", "warn"]) == [warn.id, bad.id]


def test_since_includes_its_instant_and_until_does_not() -> None:
    _, middle, _ = (event(at=NOW + timedelta(minutes=minute)) for minute in range(3))
    assert ids(since="2026-11-21T12:01:00Z", until="2026-11-21T12:02:00Z") == [middle.id]


def test_a_time_may_name_its_zone() -> None:
    _, late = (event(at=NOW + timedelta(minutes=minute)) for minute in range(2))
    assert ids(since="2026-11-21T14:01:00+02:00") == [late.id]


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_the_ends_of_the_calendar_are_times_too(time: str) -> None:
    event()
    assert bearer().get("/api/v1/events", {"since": time}).status_code == 200


def test_a_reader_asks_only_for_what_is_new() -> None:
    old, new = event(), event()
    assert ids(since_id=old.id) == [new.id]
    assert ids(since_id=new.id) == []
    assert ids(since_id=10**30) == []
