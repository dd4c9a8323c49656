"""Webhooks, and the outbox of what they are told: written with the change itself, sent afterwards."""

import secrets

from django.db import models

from controlplane.kernel.tones import Tone
from fleet.planning.states import choices
from fleet.planning.webhook import DELIVERY_TONE, DeliveryState


def new_secret() -> str:
    """A secret for signatures, 256 bits."""
    return secrets.token_hex(32)


class Webhook(models.Model):
    """An address that wants to know. `events` names what it is told; an empty list: everything."""

    name = models.SlugField(max_length=64, unique=True)
    url = models.CharField(max_length=500)
    secret = models.CharField(max_length=128, default=new_secret)
    events = models.JSONField(default=list, blank=True)
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class WebhookDelivery(models.Model):
    """One event for one webhook. `due_at`: when it is tried next, and while somebody tries it, until when he may."""

    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries")
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

    def __str__(self) -> str:
        return f"{self.event} to {self.webhook_id}: {self.state}"

    @property
    def tone(self) -> Tone:
        return DELIVERY_TONE[DeliveryState(self.state)]
