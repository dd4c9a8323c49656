"""Rows that hold from a time on: which of them does, and what may be done to them."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.capacity.services import dated_row_add, dated_row_withdraw, dated_states
from fleet.regions.models import Rate
from kernel.refusals import Conflict, InvalidInput

NOW = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)


def rate(ahead: timedelta) -> Rate:
    return Rate(kind="pue", subject="east", value=1, valid_from=NOW + ahead, actor="ada", created_at=NOW)


def add(row: Rate) -> None:
    dated_row_add(row, now=NOW, counted="what was", conflict="there is one")


def test_the_latest_that_has_begun_is_in_force_of_each_subject() -> None:
    rows: list[Any] = [
        SimpleNamespace(pk=number, subject=subject, valid_from=NOW + days * DAY)
        for number, (subject, days) in enumerate([("a", -2), ("a", -1), ("a", 1), ("b", 0), ("c", 2)])
    ]
    found = dated_states(reversed(rows), lambda row: row.subject, NOW)
    assert found == {0: "past", 1: "in force", 2: "later", 3: "in force", 4: "later"}


@pytest.mark.django_db
def test_the_list_only_grows() -> None:
    with pytest.raises(InvalidInput, match="what was already"):
        add(rate(-DAY))
    add(rate(timedelta()))
    with pytest.raises(Conflict, match="there is one"):
        add(rate(timedelta()))
    add(rate(DAY))
    first, later = Rate.objects.order_by("valid_from")
    with pytest.raises(Conflict, match="was in force"):
        dated_row_withdraw(Rate, first.pk, now=NOW)
    assert dated_row_withdraw(Rate, later.pk, now=NOW).subject == "east"
    assert list(Rate.objects.all()) == [first]
