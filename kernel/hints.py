"""Doorbells: after the commit, ask the controller or Celery's worker to look at something now instead of later.

A doorbell that cannot ring is logged and forgotten: the periodic pass does the same work a second later. It never
holds up its caller for longer than `RING_LIMIT_S`, because threads that serve many ring it.
"""

import logging
import threading
from typing import Any

from celery import Celery, current_app
from django.db import transaction

from kernel.circuit_breaker import DOORBELLS
from kernel.control_loops import is_control_loop, loop_ring

RING_LIMIT_S = 1.0
"""For each of connecting, sending and being answered; a broker in reach needs about a millisecond."""

log = logging.getLogger(__name__)


def ring(task: str, **arguments: str) -> None:
    """Ring the named control loop, or send the named task, after the current transaction (at once outside one)."""
    if is_control_loop(task):
        loop_ring(task)
        return
    transaction.on_commit(lambda: _send(task, arguments), robust=True)


class _BrokerConnection(threading.local):
    """A thread's own connection to the broker: connecting costs more than ringing, and threads must not share one.

    It is apart from Celery's own, which tries again for seconds where this one gives up at once.
    """

    connection: Any = None

    def open(self, app: Celery) -> Any:
        if self.connection is None:
            limits = {"max_retries": 0, "socket_timeout": RING_LIMIT_S, "socket_connect_timeout": RING_LIMIT_S}
            options = {**app.conf.broker_transport_options, **limits}
            self.connection = app.connection_for_write(connect_timeout=RING_LIMIT_S, transport_options=options)
        return self.connection

    def drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.release()


_broker = _BrokerConnection()


def _send(task: str, arguments: dict[str, str]) -> None:
    if DOORBELLS.is_open:
        return
    try:
        current_app.send_task(task, kwargs=arguments, expires=5.0, connection=_broker.open(current_app))
    except Exception as error:
        DOORBELLS.trip()
        _broker.drop()
        log.warning("doorbell %s did not ring, nor will others for %.0f s: %s", task, DOORBELLS.pause_s, error)
