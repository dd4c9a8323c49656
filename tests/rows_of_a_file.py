"""Rows that all tests of a file read: made once for them, and taken back after the last one."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction
from pytest_django import DjangoDbBlocker


@contextmanager
def rows_of_a_file(blocker: DjangoDbBlocker) -> Iterator[None]:
    """Around the making of rows and the `yield` of a fixture for a module, which needs `django_db_setup` too.

    What a test adds is taken back after it, as ever. Tests that commit cannot use such rows.
    """
    with blocker.unblock(), transaction.atomic():
        yield
        transaction.set_rollback(True)
