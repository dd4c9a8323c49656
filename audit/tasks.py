from celery import shared_task
from django.conf import settings

from audit.services.export import audit_export_on
from kernel import clock


@shared_task(name="audit.export")
def export() -> None:
    audit_export_on(target=settings.AUDIT_EXPORT, now=clock.now())
