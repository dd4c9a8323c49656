"""Compare-and-set: change a row only if it still is as the decision saw it, and record the event in the same
transaction.

Zero rows updated means that the decision was stale. The caller drops it; the next pass replans."""

from datetime import datetime
from typing import Any

from django.db import models, transaction

from kernel.events import event_record


class StaleDecision(Exception):
    """The row changed after the snapshot was taken. Raised inside `atomic` it rolls back the whole step."""


def compare_and_set(
    rows: "models.QuerySet[Any]", *, event: dict[str, Any] | None, now: datetime, **changes: Any
) -> bool:
    """Apply `changes` to the one row that `rows` selects by id, state and generation.

    Returns False and writes nothing if no row matches any more. `event` holds the arguments of
    `event_record`, or None for a change without an event."""
    with transaction.atomic():
        if rows.update(**changes) == 0:
            return False
        if event is not None:
            event_record(now=now, **event)
    return True


def compare_and_set_or_stale(rows: "models.QuerySet[Any]", *, what: str, **changes: Any) -> None:
    """Part of a larger step: apply or raise. Raises StaleDecision if no row matches any more."""
    if rows.update(**changes) == 0:
        raise StaleDecision(what)
