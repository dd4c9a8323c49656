"""Doorbells to the worker: after the commit, ask Celery to look at something now instead of at its next tick.

A doorbell that cannot ring is logged and forgotten: the periodic pass does the same work a second later.
"""

import logging

from django.db import transaction

log = logging.getLogger(__name__)


def ring(task: str, **arguments: str) -> None:
    """Send the named task after the current transaction commits (at once outside one)."""
    transaction.on_commit(lambda: _send(task, arguments), robust=True)


def _send(task: str, arguments: dict[str, str]) -> None:
    from controlplane.celery import app

    try:
        app.send_task(task, kwargs=arguments, expires=5.0)
    except Exception as error:
        log.warning("doorbell %s did not ring: %s", task, error)
