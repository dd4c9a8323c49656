"""Application keys, and whether one is required. The text of a key is shown once and stored only as a hash."""

from datetime import datetime

from django.db import models

from engine_agent.protocol.states import ServingClass
from fleet.reconcile.planning.states import choices
from kernel.tones import Tone
from traffic.keys.planner import KEY_TONE, KeyState, key_state


class ApplicationKey(models.Model):
    """A key of one tenant. A limit of 0 means none; no deployments means all. Browser pages of `allowed_origins` may
    use it. `first_prefix`: the first key that rotations have replaced, or empty. `revoked_version` is the first
    `KeyPolicy.version` without this key; `refused_everywhere_at` is when the last ingress enforced that version."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    first_prefix = models.CharField(max_length=16, blank=True, db_index=True)
    name = models.CharField(max_length=96)
    tenant = models.CharField(max_length=64, db_index=True)
    deployments = models.JSONField(default=list, blank=True)
    serving_class = models.CharField(max_length=16, choices=choices(ServingClass), default=ServingClass.REALTIME.value)
    requests_per_min = models.PositiveIntegerField(default=0)
    tokens_per_min = models.PositiveIntegerField(default=0)
    max_concurrent = models.PositiveIntegerField(default=0)
    allowed_origins = models.JSONField(default=list, blank=True)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    revoked_version = models.PositiveBigIntegerField(null=True)
    refused_everywhere_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["id"], name="key_unrevoked", condition=models.Q(revoked_at=None))]

    def __str__(self) -> str:
        return f"{self.name} (sw_{self.prefix}…)"

    @property
    def budget_key(self) -> str:
        """The prefix that its budget names. A key shares its budget with all keys that it replaced."""
        return self.first_prefix or self.prefix

    def state_at(self, now: datetime) -> KeyState:
        return key_state(revoked_at=self.revoked_at, expires_at=self.expires_at, now=now)

    def tone_at(self, now: datetime) -> Tone:
        return KEY_TONE[self.state_at(now)]

    @property
    def revocation_lag_s(self) -> float | None:
        """Returns the seconds from the revocation until every ingress refused the key; None until then."""
        if self.revoked_at is None or self.refused_everywhere_at is None:
            return None
        return round((self.refused_everywhere_at - self.revoked_at).total_seconds(), 3)


class KeyPolicy(models.Model):
    """Single row about all keys. `version` grows with every change and is named by routing tables. `change` is a random
    value per change, so that versions also differ after a backup is restored."""

    required = models.BooleanField(default=False)
    version = models.PositiveBigIntegerField(default=0)
    change = models.CharField(max_length=32, blank=True)
    actor = models.CharField(max_length=64, blank=True)
    changed_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"keys {'required' if self.required else 'not required'}, version {self.version}"
