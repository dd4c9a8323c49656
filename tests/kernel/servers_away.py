"""Servers that do not answer, and the settings that point hints and wake-ups at them."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection

from controlplane.celery import app
from kernel import circuit_breaker, live, wake_ups

KINDS = ("refuses", "is silent")


@contextmanager
def server_away(kind: str) -> Iterator[str]:
    """URL of a Redis that refuses connections, or accepts them and never answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: the kernel refuses connections and reserves the port
        if kind == "is silent":
            held.listen(64)
        yield f"redis://127.0.0.1:{held.getsockname()[1]}/0"


@contextmanager
def statement_breaks_off(words: str) -> Iterator[None]:
    """A statement with these words fails by a timeout, and so does the block."""

    def break_off(execute: Callable[..., Any], statement: object, *arguments: Any) -> Any:
        if words in str(statement):
            raise OperationalError("canceling statement due to statement timeout")
        return execute(statement, *arguments)

    with connection.execute_wrapper(break_off), pytest.raises(OperationalError):
        yield


def use_fresh_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets connections and failures of earlier tests. After a failure nothing is tried again."""
    live._sender.drain()
    wake_ups._broker.drop()
    closed = circuit_breaker.CircuitBreaker(pause_s=2.0, now_s=lambda: 0.0)
    monkeypatch.setattr(wake_ups, "VALKEY_BREAKER", closed)
    monkeypatch.setattr(live, "VALKEY_BREAKER", closed)


def point_valkey_at(url: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `url` the broker and the channel layer of this test."""
    use_fresh_connections(monkeypatch)
    monkeypatch.setitem(app.conf, "broker_url", url)
    for owner, pool in ((app, "_pool"), (app.amqp, "_producer_pool")):
        monkeypatch.setattr(owner, pool, None)  # a pool keeps the broker with which it was made
    layer = settings.CHANNEL_LAYERS["default"]
    settings.CHANNEL_LAYERS = {"default": {**layer, "CONFIG": {**layer["CONFIG"], "hosts": [url]}}}
