"""Wake-ups: after the commit, make a control loop or a Celery task run now instead of at its next interval.

A wake-up that cannot be sent is logged and dropped: the periodic pass does the same work a second later. Sending takes
at most `SEND_LIMIT_S`, because threads that serve many requests send wake-ups."""

import logging
import threading
from typing import Any

from celery import Celery, current_app
from django.db import transaction

from kernel.circuit_breaker import VALKEY_BREAKER
from kernel.control_loops import is_control_loop, wake_loop

SEND_LIMIT_S = 1.0
"""For each of connecting, sending and the answer. A broker in reach needs about a millisecond."""

log = logging.getLogger(__name__)


def send(task: str, **arguments: str) -> None:
    """Wake the named control loop, or send the named task, after the current transaction (immediately outside one)."""
    if is_control_loop(task):
        wake_loop(task)
        return
    transaction.on_commit(lambda: send_task(task, arguments, expires_s=5.0), robust=True)


class _BrokerConnection(threading.local):
    """One connection to the broker per thread: connecting costs more than sending, and threads must not share one.

    Celery's own connection retries for seconds; this one gives up after one try."""

    connection: Any = None

    def open(self, app: Celery) -> Any:
        if self.connection is None:
            limits = {"max_retries": 0, "socket_timeout": SEND_LIMIT_S, "socket_connect_timeout": SEND_LIMIT_S}
            options = {**app.conf.broker_transport_options, **limits}
            self.connection = app.connection_for_write(connect_timeout=SEND_LIMIT_S, transport_options=options)
        return self.connection

    def drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.release()


_broker = _BrokerConnection()


def send_task(task: str, arguments: dict[str, str], *, expires_s: float | None) -> None:
    """Send it now. Never raises."""
    if VALKEY_BREAKER.is_open:
        return
    try:
        current_app.send_task(task, kwargs=arguments, expires=expires_s, connection=_broker.open(current_app))
    except Exception as error:
        VALKEY_BREAKER.trip()
        _broker.drop()
        log.warning("could not wake %s; no other wake-up is sent for %.0f s: %s", task, VALKEY_BREAKER.pause_s, error)
