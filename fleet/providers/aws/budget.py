"""What is left of our calls to EC2, in rows that all processes share: see `fleet.planning.call_budget`."""

from datetime import datetime

from django.db import transaction

from fleet.models import CallBucket
from fleet.planning.call_budget import (
    ENDED_MACHINES,
    LAUNCHED_MACHINES,
    Bucket,
    NotBefore,
    bucket_of,
    full,
    take,
    throttled,
)
from kernel import clock

MACHINES = {"RunInstances": LAUNCHED_MACHINES, "TerminateInstances": ENDED_MACHINES}
"""These are metered by machines, too."""


def budget_spend(region: str, operation: str, machines: int) -> datetime | None:
    """Take one call, of so many machines, from the budget of a region of AWS. Returns None, or when there will be one:
    nothing was taken then.

    Raises:
        ValueError: there is never so much.
    """
    wanted = [(bucket_of(operation), 1.0)]
    if operation in MACHINES:
        wanted.append((MACHINES[operation], float(machines)))
    now = clock.now()
    with transaction.atomic():
        taken = []
        for name, amount in wanted:
            row = _locked(region, name, now)
            answer = take(name, _bucket(row), now, amount)
            if isinstance(answer, NotBefore):
                return answer.at
            taken.append((row, answer.bucket))
        for row, bucket in taken:
            _store(row, bucket)
    return None


def budget_throttled(region: str, operation: str) -> None:
    """EC2 says that there were too many of these calls."""
    now, name = clock.now(), bucket_of(operation)
    with transaction.atomic():
        row = _locked(region, name, now)
        _store(row, throttled(name, _bucket(row), now))


def _locked(region: str, name: str, now: datetime) -> CallBucket:
    fresh = full(name, now)
    new = {"tokens": fresh.tokens, "refilled_at": fresh.refilled_at}
    return CallBucket.objects.select_for_update().get_or_create(region=region, call=name, defaults=new)[0]


def _bucket(row: CallBucket) -> Bucket:
    return Bucket(row.tokens, row.refilled_at, row.halved_until)


def _store(row: CallBucket, bucket: Bucket) -> None:
    row.tokens, row.refilled_at, row.halved_until = bucket.tokens, bucket.refilled_at, bucket.halved_until
    row.save(update_fields=["tokens", "refilled_at", "halved_until"])
