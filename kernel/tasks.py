"""Housekeeping tasks of the kernel."""

from datetime import timedelta

from celery import shared_task

from kernel import clock
from kernel.models import Event, IdempotentAnswer
from kernel.rest.changes import changes_trim

EVENTS_KEPT = timedelta(days=30)
CHANGES_KEPT = timedelta(hours=2)


@shared_task(name="kernel.trim_events")
def trim_events() -> None:
    Event.objects.filter(at__lt=clock.now() - EVENTS_KEPT).delete()


@shared_task(name="kernel.trim_changes")
def trim_changes() -> None:
    """Watchers that come back later begin anew."""
    changes_trim(clock.now() - CHANGES_KEPT)


@shared_task(name="kernel.trim_idempotent_answers")
def trim_idempotent_answers() -> None:
    IdempotentAnswer.objects.filter(expires_at__lte=clock.now()).delete()
