from django.apps import AppConfig


class AuditConfig(AppConfig):
    name = "controlplane.audit"
    label = "audit"

    def ready(self) -> None:
        """Listen for logins, which answer 200 and 302 whatever becomes of them."""
        from controlplane.audit import logins

        logins.listen()
