from django.apps import AppConfig


class AuditConfig(AppConfig):
    name = "audit"
    label = "audit"

    def ready(self) -> None:
        """Listen for logins, which answer 200 and 302 whatever becomes of them."""
        from audit import logins

        logins.listen()
