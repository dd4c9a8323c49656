"""A task of Celery's worker uses the connection of the one before, unless that is of no use any more."""

import pytest
from celery import signals
from celery.fixups.django import DjangoWorkerFixup  # type: ignore[attr-defined]  # its types do not know it
from django.db import connection

from controlplane.celery import app
from kernel.tasks import heartbeat

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def between_tasks() -> DjangoWorkerFixup:
    return DjangoWorkerFixup(app)


def one_task(fixup: DjangoWorkerFixup) -> None:
    fixup.close_database()
    signals.task_prerun.send(sender=heartbeat, task=heartbeat, task_id="1")
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    fixup.close_database()


def test_tasks_share_a_connection(between_tasks: DjangoWorkerFixup) -> None:
    one_task(between_tasks)
    first = connection.connection
    one_task(between_tasks)
    assert connection.connection is first


def test_one_that_broke_is_replaced(between_tasks: DjangoWorkerFixup) -> None:
    one_task(between_tasks)
    first = connection.connection
    first.close()  # as a server does that is started again
    one_task(between_tasks)
    assert connection.connection is not first
    assert connection.is_usable()
