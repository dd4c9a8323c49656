"""Rows that all tests of a file read: made once for them, and taken back after the last one."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction
from pytest_django import DjangoDbBlocker


@contextmanager
def rows_of_a_file(blocker: DjangoDbBlocker) -> Iterator[None]:
    """Wraps a module fixture that creates rows; the fixture also needs `django_db_setup`.

    Rows that a test adds are rolled back after it. Tests that commit cannot use such rows.
    """
    with blocker.unblock(), transaction.atomic():
        yield
        transaction.set_rollback(True)
