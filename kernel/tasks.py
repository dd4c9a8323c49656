"""Housekeeping tasks of the kernel."""

from datetime import timedelta
from time import time
from typing import Any

from celery import shared_task

from kernel import clock
from kernel.control_standing import HOUSEKEEPING
from kernel.loop_passes import loop_passed
from kernel.models import Event, IdempotentAnswer
from kernel.rest.changes import changes_trim

EVENTS_KEPT = timedelta(days=30)
CHANGES_KEPT = timedelta(hours=2)
SENT_AT = "switchyard_sent_at"
"""Header of every message: Unix time of its sending, by the sender's clock."""


@shared_task(name="kernel.heartbeat", bind=True)
def heartbeat(self: Any) -> None:
    """Record how long this task's message waited in the queue of housekeeping. Between two hosts this includes the
    difference of their clocks."""
    sent_at = self.request.get(SENT_AT) or (self.request.headers or {}).get(SENT_AT)
    loop_passed(HOUSEKEEPING, waited_s=max(0.0, time() - float(sent_at)) if sent_at else 0.0)


@shared_task(name="kernel.trim_events")
def trim_events() -> None:
    Event.objects.filter(at__lt=clock.now() - EVENTS_KEPT).delete()


@shared_task(name="kernel.trim_changes")
def trim_changes() -> None:
    """Deletes old changes; later watchers have to list all objects again."""
    changes_trim(clock.now() - CHANGES_KEPT)


@shared_task(name="kernel.trim_idempotent_answers")
def trim_idempotent_answers() -> None:
    IdempotentAnswer.objects.filter(expires_at__lte=clock.now()).delete()
