"""Celery tasks of the audit log. Each calls one service and decides nothing."""

from celery import shared_task
from django.conf import settings

from audit.services import audit_export_on
from kernel import clock


@shared_task(name="audit.services")
def export() -> None:
    audit_export_on(target=settings.AUDIT_EXPORT, now=clock.now())
