"""What a tenant's own address is told of a batch, as OpenAI's webhooks say it. Pure."""

from datetime import datetime
from enum import StrEnum
from typing import Any


class BatchEvent(StrEnum):
    """OpenAI's four, and one of ours."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"
    AT_RISK = "switchyard.batch.deadline_at_risk"


def batch_event_json(event: BatchEvent, batch_id: str) -> dict[str, Any]:
    """The event's own part: who gets it reads the batch with its key."""
    return {"type": event.value, "data": {"id": batch_id}}


def secrets_in_force(secret: str, former: str, former_until: datetime | None, now: datetime) -> tuple[str, ...]:
    """Those that a message is signed by: for a day after a change both, so that a receiver may change in its own
    time."""
    is_in_force = former and former_until is not None and now < former_until
    return (secret, former) if is_in_force else (secret,)
