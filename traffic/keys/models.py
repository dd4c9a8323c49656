"""Application keys, and whether one is required. The text of a key is shown once and stored as a hash."""

from datetime import datetime

from django.db import models

from engine_agent.protocol.states import ServingClass
from fleet.reconcile.planning.states import choices
from kernel.tones import Tone
from traffic.keys.planner import KEY_TONE, KeyState, key_state


class ApplicationKey(models.Model):
    """What an application shows to be served, for one tenant. A limit of 0 is none; no deployments: all of them. Pages
    of browsers may show it if they are of one of `allowed_origins`.

    `revoked_version` is the version of all keys (`KeyPolicy`) that no longer has this one, and `refused_everywhere_at`
    when the last ingress had that version in force.
    """

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
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

    def state_at(self, now: datetime) -> KeyState:
        return key_state(revoked_at=self.revoked_at, expires_at=self.expires_at, now=now)

    def tone_at(self, now: datetime) -> Tone:
        return KEY_TONE[self.state_at(now)]

    @property
    def revocation_lag_s(self) -> float | None:
        """From the revocation until no ingress took the key any more, in seconds; None until then."""
        if self.revoked_at is None or self.refused_everywhere_at is None:
            return None
        return round((self.refused_everywhere_at - self.revoked_at).total_seconds(), 3)


class KeyPolicy(models.Model):
    """The one row about all keys. `version` grows with every change of any of them; routing tables name it. `change`
    is random, and another with every change, also after a restored backup has set the version back."""

    required = models.BooleanField(default=False)
    version = models.PositiveBigIntegerField(default=0)
    change = models.CharField(max_length=32, blank=True)
    actor = models.CharField(max_length=64, blank=True)
    changed_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"keys {'required' if self.required else 'not required'}, version {self.version}"
