"""Ends of passes that are written down together, each with its own time, and none lost to a server that is away."""

from typing import Any

import pytest
from django.db import OperationalError, connection

from kernel.loop_passes import PassBook, control_standing

pytestmark = pytest.mark.django_db


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ages() -> dict[str, float]:
    return {loop.loop: loop.age_s for loop in control_standing().loops}


def test_passes_of_many_loops_are_one_statement_and_keep_their_times(django_assert_num_queries: Any) -> None:
    clock = Clock()
    book = PassBook(clock)
    book.note("first", 0.1)
    clock.now_s += 3600.0
    book.note("second", 0.2)
    with django_assert_num_queries(1):
        book.write()
    assert ages()["first"] - ages()["second"] == pytest.approx(3600.0, abs=1.0)
    with django_assert_num_queries(0):
        book.write()


def test_what_could_not_be_written_is_written_the_next_time_unless_it_is_old_by_then() -> None:
    clock = Clock()
    book = PassBook(clock)
    book.note("once", 0.1)
    book.note("again", 0.1)

    def away(*_: Any) -> None:
        clock.now_s += 3600.0
        book.note("again", 0.2)
        raise OperationalError("the server is away")

    with connection.execute_wrapper(away), pytest.raises(OperationalError):
        book.write()
    book.write()
    assert ages()["once"] - ages()["again"] == pytest.approx(3600.0, abs=1.0)
    assert {loop.loop: loop.took_s for loop in control_standing().loops}["again"] == 0.2
