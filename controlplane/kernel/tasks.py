"""Housekeeping tasks of the kernel."""

from datetime import timedelta

from celery import shared_task

from controlplane.kernel import clock
from controlplane.kernel.models import Event

EVENTS_KEPT = timedelta(days=30)


@shared_task(name="kernel.trim_events")
def trim_events() -> None:
    Event.objects.filter(at__lt=clock.now() - EVENTS_KEPT).delete()
