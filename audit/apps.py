from django.apps import AppConfig
from django.db.models.signals import post_migrate


class AuditConfig(AppConfig):
    name = "audit"
    label = "audit"

    def ready(self) -> None:
        """Note logins; put the capture's triggers on every table after migrations."""
        from audit import signals
        from audit.row_capture import install_triggers

        signals.connect()
        post_migrate.connect(install_triggers, sender=self, dispatch_uid="audit-row-capture")
