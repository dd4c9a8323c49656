"""The tables of webhooks and of their outbox: messages are written in the transaction of the change, and sent
afterwards."""

import secrets

from django.db import models

from fleet.reconcile.planning.states import choices
from fleet.webhooks.planner import DELIVERY_TONE, DeliveryState, WebhookFormat
from kernel.outbound import shown_url
from kernel.tones import Tone


def new_secret() -> str:
    """Returns a random secret of 256 bits."""
    return secrets.token_hex(32)


class Webhook(models.Model):
    """A receiver. `events`: subscribed events; empty: all."""

    name = models.SlugField(max_length=64, unique=True)
    url = models.CharField(max_length=500)
    secret = models.CharField(max_length=128, default=new_secret)
    format = models.CharField(max_length=8, choices=choices(WebhookFormat), default=WebhookFormat.JSON.value)
    events = models.JSONField(default=list, blank=True)
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def shown_url(self) -> str:
        """Its URL without secret parts."""
        return shown_url(self.url)


class WebhookDelivery(models.Model):
    """One message for a webhook, or for a URL that was given only for it, with the secret for its signature.

    `is_standard`: in the form of Standard Webhooks; `secret` may then hold several, separated by spaces. `origin`: the
    source of the URL, if that may be withdrawn. `due_at`: next attempt; during an attempt, end of its claim."""

    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries", null=True)
    own_url = models.CharField(max_length=500, blank=True)
    own_secret = models.CharField(max_length=128, blank=True)
    is_standard = models.BooleanField(default=False)
    origin = models.CharField(max_length=64, blank=True)
    event = models.CharField(max_length=64)
    body = models.JSONField()
    state = models.CharField(max_length=16, choices=choices(DeliveryState), default=DeliveryState.PENDING.value)
    attempts = models.PositiveIntegerField(default=0)
    reason = models.TextField(blank=True)
    status = models.PositiveIntegerField(null=True)
    created_at = models.DateTimeField()
    due_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["due_at"], name="delivery_due", condition=models.Q(state=DeliveryState.PENDING.value))
        ]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(webhook__isnull=False, own_url="") | models.Q(webhook=None) & ~models.Q(own_url=""),
                name="delivery_has_one_address",
            )
        ]

    def __str__(self) -> str:
        return f"{self.event} to {self.receiver}: {self.state}"

    @property
    def receiver(self) -> str:
        return f"webhook {self.webhook.name}" if self.webhook else shown_url(self.own_url)

    @property
    def receiver_key(self) -> str:
        """The unit that a slow receiver delays: the webhook, else host and port of the URL."""
        return str(self.webhook_id) if self.webhook_id is not None else self.own_url.split("/")[2]

    @property
    def url(self) -> str:
        return self.webhook.url if self.webhook else self.own_url

    @property
    def secret(self) -> str:
        return self.webhook.secret if self.webhook else self.own_secret

    @property
    def tone(self) -> Tone:
        return DELIVERY_TONE[DeliveryState(self.state)]
