"""Tables of tenants: grants for callback hosts and buckets, and webhooks with their signing secrets."""

import base64
import secrets
from enum import StrEnum

from django.db import models

from fleet.webhooks.planner import SECRET_PREFIX
from kernel.outbound import shown_url
from traffic.tenants.planner import ObjectUri, parse_object_uri

SECRET_BYTES = 32


def new_signing_secret() -> str:
    """Returns 256 bits in the format of Standard Webhooks."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


class GrantUse(StrEnum):
    """`CALLBACK`: callbacks and webhooks may call a host. `READ`, `WRITE`: batches may use an S3 prefix."""

    CALLBACK = "callback"
    READ = "read"
    WRITE = "write"


class TenantGrant(models.Model):
    """A host (`name`, or `name:port` unless 443) that a tenant's callbacks may call, or an S3 prefix that its batches
    may read or write. The empty tenant stands for requests without a key."""

    tenant = models.CharField(max_length=64, blank=True)
    use = models.CharField(max_length=8, choices=[(use.value, use.value) for use in GrantUse])
    target = models.CharField(max_length=1000)
    region = models.CharField(max_length=32, blank=True)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["tenant", "use", "target"]
        constraints = [models.UniqueConstraint(fields=["tenant", "use", "target"], name="tenant_grant_once")]

    def __str__(self) -> str:
        is_host = self.use == GrantUse.CALLBACK
        whose = f"of {self.tenant}" if self.tenant else "without a key"
        return f"{'callbacks' if is_host else 'batches'} {whose} may {'go to' if is_host else self.use} {self.target}"

    @property
    def place(self) -> ObjectUri:
        return parse_object_uri(self.target)


class TenantWebhook(models.Model):
    """A tenant's URL for messages about its batches (Standard Webhooks). Messages also carry the former secret's
    signature until `former_until`."""

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
        """Origin of its messages in the outbox."""
        return f"tenant-webhook {self.pk}"

    @property
    def shown_url(self) -> str:
        return shown_url(self.url)
