"""Housekeeping on real PostgreSQL."""

from datetime import timedelta

import pytest

from kernel import clock
from kernel.events import event_record
from kernel.models import Event
from kernel.tasks import EVENTS_KEPT, trim_events

pytestmark = pytest.mark.django_db


def test_events_are_kept_for_thirty_days_and_then_go() -> None:
    now = clock.now()
    event_record(kind="old", message="", now=now - EVENTS_KEPT - timedelta(minutes=1))
    event_record(kind="kept", message="", now=now - EVENTS_KEPT + timedelta(minutes=1))
    trim_events()
    assert [event.kind for event in Event.objects.all()] == ["kept"]
