"""Celery's way into the audit."""

from celery import shared_task
from django.conf import settings

from controlplane.audit.services.export import audit_export_on
from controlplane.kernel import clock


@shared_task(name="audit.export")
def export() -> None:
    audit_export_on(target=settings.AUDIT_EXPORT, now=clock.now())
