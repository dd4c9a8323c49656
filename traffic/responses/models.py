"""Table of stored responses (`/v1/responses`). Each belongs to one tenant; other tenants never see it."""

import secrets

from django.db import models
from django.db.models import Q

from fleet.reconcile.planning.states import choices
from traffic.async_requests.models import AsyncRequest
from traffic.responses.planner import OPEN_RESPONSES, ResponseState

OPEN_RESPONSE_STATES = sorted(state.value for state in OPEN_RESPONSES)


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(16)}"


class StoredResponse(models.Model):
    """A stored response of one tenant. `previous` is an ID without a foreign key, since the previous response may be
    deleted. `input` and `response` are JSON: the items of this turn only, and the object as shown. `turns` includes all
    previous ones. `request` creates it in the background and is deleted earlier."""

    id = models.CharField(max_length=40, primary_key=True, default=new_response_id)
    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    model = models.CharField(max_length=200)
    previous = models.CharField(max_length=40, blank=True)
    is_background = models.BooleanField(default=False)
    request = models.OneToOneField(
        AsyncRequest, null=True, on_delete=models.SET_NULL, related_name="stored_response"
    )  # fmt: skip
    state = models.CharField(max_length=16, choices=choices(ResponseState))
    turns = models.PositiveIntegerField(default=1)
    input = models.BinaryField()
    response = models.BinaryField()
    bytes = models.PositiveIntegerField()
    created_at = models.DateTimeField(db_index=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created_at"]
        indexes = [models.Index(fields=["tenant", "created_at"], include=["bytes"], name="response_of_tenant")]
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=OPEN_RESPONSE_STATES, ended_at=None)
                | (~Q(state__in=OPEN_RESPONSE_STATES) & Q(ended_at__isnull=False)),
                name="response_ends_once",
            ),
            models.CheckConstraint(
                condition=Q(is_background=True) | ~Q(state__in=OPEN_RESPONSE_STATES), name="response_open_in_background"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id}: {self.state}"
