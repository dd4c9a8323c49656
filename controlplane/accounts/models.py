"""API tokens, and failed logins while they still count. Secrets are shown once and stored as hashes."""

from datetime import datetime

from django.conf import settings
from django.db import models


class ApiToken(models.Model):
    """A bearer token of the REST API, acting as its user."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    name = models.CharField(max_length=96)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_tokens")
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    def refusal(self, now: datetime) -> str | None:
        """Why this token no longer opens anything, or None while it does."""
        if self.revoked_at is not None:
            return f"API token {self.name!r} was revoked at {self.revoked_at:%Y-%m-%d %H:%M} UTC; create another one"
        if self.expires_at is not None and self.expires_at <= now:
            return f"API token {self.name!r} expired at {self.expires_at:%Y-%m-%d %H:%M} UTC; create another one"
        if not self.user.is_active:
            return f"the user of API token {self.name!r} is deactivated"
        return None


class LoginFailure(models.Model):
    """One wrong password. `subject` digests user name and address: people type passwords into the wrong field."""

    subject = models.CharField(max_length=64)
    at = models.DateTimeField(db_index=True)

    class Meta:
        indexes = [models.Index(fields=["subject", "at"], name="login_failure_subject")]

    def __str__(self) -> str:
        return f"{self.subject[:8]}… at {self.at:%H:%M:%S}"
