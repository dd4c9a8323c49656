"""What an operator lets a tenant's batches reach: places in S3, and addresses that are told when one ends."""

import base64
import secrets

from django.db import models
from django.db.models import Q

from fleet.planning.webhooks.delivery import shown_url
from fleet.planning.webhooks.standard import SECRET_PREFIX
from traffic.planning.object_uri import ObjectUri

SECRET_BYTES = 32


def new_signing_secret() -> str:
    """In the form of Standard Webhooks, 256 bits."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


class BucketGrant(models.Model):
    """A place in S3 that batches of one tenant may read their input from, write their results to, or both. The empty
    tenant is batches without a key."""

    tenant = models.CharField(max_length=64, blank=True)
    bucket = models.CharField(max_length=63)
    prefix = models.CharField(max_length=900, blank=True)
    region = models.CharField(max_length=32)
    may_read = models.BooleanField()
    may_write = models.BooleanField()
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["tenant", "bucket", "prefix"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "bucket", "prefix"], name="bucket_grant_once"),
            models.CheckConstraint(condition=Q(may_read=True) | Q(may_write=True), name="bucket_grant_of_something"),
        ]

    def __str__(self) -> str:
        return f"{self.place} for {self.tenant or 'batches without a key'}"

    @property
    def place(self) -> ObjectUri:
        return ObjectUri(self.bucket, self.prefix)


class TenantWebhook(models.Model):
    """An address of a tenant that is told of its batches, by messages as Standard Webhooks have them. Until
    `former_until` they are signed by the former secret, too."""

    tenant = models.CharField(max_length=64, blank=True)
    url = models.CharField(max_length=500)
    events = models.JSONField(default=list, blank=True)
    secret = models.CharField(max_length=64, default=new_signing_secret)
    former_secret = models.CharField(max_length=64, blank=True)
    former_until = models.DateTimeField(null=True)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["tenant", "id"]
        constraints = [models.UniqueConstraint(fields=["tenant", "url"], name="tenant_webhook_once")]

    def __str__(self) -> str:
        return f"{self.shown_url} for {self.tenant or 'batches without a key'}"

    @property
    def origin(self) -> str:
        """What its messages in the outbox are found by."""
        return f"tenant-webhook {self.pk}"

    @property
    def shown_url(self) -> str:
        """Its address as it may be shown."""
        return shown_url(self.url)
