"""Rows that state something from a time on, such as prices: the list only grows. What holds was counted by, so it is
never changed; what is to hold later may be withdrawn."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from django.db import IntegrityError, models, transaction

from kernel.refusals import Conflict, InvalidInput

R = TypeVar("R", bound=models.Model)


def dated_row_add(row: Any, *, now: datetime, counted: str, conflict: str) -> None:
    """Write a new row, with its `valid_from`. Part of the caller's transaction. `counted`: what was, until now;
    `conflict`: what there is already, where there is a row from that very time on.

    Raises:
        InvalidInput: a time that has passed.
        Conflict: there is one.
    """
    if row.valid_from < now:
        raise InvalidInput(field="valid_from", rule="future", message=f"must not be in the past: {counted} already")
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(conflict) from error


def dated_row_withdraw(model: type[R], pk: int, *, now: datetime) -> R:
    """Take back a row that does not hold yet; returns what it was. Part of the caller's transaction.

    Raises:
        Conflict: something may have been counted by it.
    """
    row: Any = model._default_manager.select_for_update().get(pk=pk)
    if row.valid_from <= now:
        raise Conflict(f"the {row} was in force; set another one instead")
    row.delete()
    return row  # type: ignore[no-any-return]


def dated_states(rows: Iterable[Any], of: Callable[[Any], object], now: datetime) -> dict[int, str]:
    """Row -> `in force`, `later` or `past`. `of`: what a row is about; the latest that has begun is in force of it."""
    found: dict[int, str] = {}
    current: dict[object, int] = {}
    for row in sorted(rows, key=lambda row: row.valid_from):
        found[row.pk] = "later"
        if row.valid_from <= now:
            found[current.get(of(row), row.pk)] = "past"
            found[row.pk], current[of(row)] = "in force", row.pk
    return found
