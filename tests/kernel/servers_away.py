"""Servers that do not answer, and the settings that point hints and doorbells at them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from controlplane.celery import app
from kernel import circuit_breaker, hints, live

KINDS = ("refuses", "is silent")


@contextmanager
def server_away(kind: str) -> Iterator[str]:
    """URL of a Redis that refuses connections, or takes them and never says a word."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: the kernel refuses, and nobody else gets the port
        if kind == "is silent":
            held.listen(64)
        yield f"redis://127.0.0.1:{held.getsockname()[1]}/0"


def use_fresh_doorbells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing remembered of earlier tests: neither a connection nor a failure. What fails stays unused from then on."""
    live._sender.drain()
    closed = circuit_breaker.CircuitBreaker(pause_s=2.0, now_s=lambda: 0.0)
    monkeypatch.setattr(hints, "DOORBELLS", closed)
    monkeypatch.setattr(live, "DOORBELLS", closed)
    monkeypatch.setattr(hints, "_broker", hints._BrokerConnection())


def point_doorbells_at(url: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `url` the broker and the channel layer of this test."""
    use_fresh_doorbells(monkeypatch)
    monkeypatch.setitem(app.conf, "broker_url", url)
    layer = settings.CHANNEL_LAYERS["default"]
    settings.CHANNEL_LAYERS = {"default": {**layer, "CONFIG": {**layer["CONFIG"], "hosts": [url]}}}
