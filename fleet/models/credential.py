"""How agents prove who they are. Secrets are stored as hashes; the prefix finds the row."""

from django.db import models

from engine_agent.protocol.states import AgentKind
from fleet.planning.states import choices


class JoinToken(models.Model):
    """A short-lived right to enrol, bound to one agent that the control plane itself launched."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    kind = models.CharField(max_length=16, choices=choices(AgentKind))
    subject = models.CharField(max_length=64)
    region = models.CharField(max_length=64)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"join token {self.prefix} for {self.subject}"


class AgentCredential(models.Model):
    """What an agent shows on every connection."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    kind = models.CharField(max_length=16, choices=choices(AgentKind))
    subject = models.CharField(max_length=64, db_index=True)
    region = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"credential {self.prefix} of {self.subject}"
