"""Hints to browsers and to the processes that hold agents' sockets: "look again at X". Never the content itself.

They travel after the commit and may be lost; whoever listens also polls slowly. A thread of its own sends them over one
connection, so a hint holds up nobody: a pass over a large fleet may give hundreds.
"""

import asyncio
import atexit
import logging
import threading
from typing import Any

from channels.layers import get_channel_layer
from django.db import transaction

from kernel.circuit_breaker import VALKEY_BREAKER
from kernel.tracing import request_id, traceparent

SEND_LIMIT_S = 1.0
"""Of one hint; a server in reach takes milliseconds. Also how long a process that ends waits for its last ones."""
MOST_WAITING = 1000
"""Hints of one process that are not sent yet; further ones are lost."""
BROWSERS = "browsers"
AGENT_SOCKETS = "agent-sockets"
TRUST_CHANGED = "agent.trust"

log = logging.getLogger(__name__)


def push(topic: str, key: str = "") -> None:
    """Tell browsers that a topic (`cells`, `nodes`, `events`, …) changed; `key` names the one thing, if one."""
    _after_commit(BROWSERS, {"type": "live.hint", "topic": topic, "key": key})


def push_desired(node_ids: list[str]) -> None:
    """Tell the processes that hold agents' sockets that the orders of these nodes changed, and what that came of."""
    cause = {"cause": {"request_id": request_id(), "traceparent": traceparent()}} if request_id() else {}
    _after_commit(AGENT_SOCKETS, {"type": "agent.desired", "nodes": node_ids, **cause})


def push_table(region: str) -> None:
    """Tell the processes that hold ingresses' sockets that a region's routing table has a new revision."""
    _after_commit(AGENT_SOCKETS, {"type": "agent.table", "region": region})


def push_trust() -> None:
    """Tell the processes that hold agents' sockets that other authorities or revocation lists count."""
    _after_commit(AGENT_SOCKETS, {"type": TRUST_CHANGED})


def push_goodbye(session_key: str) -> None:
    """Close the WebSockets of a session that has ended. A lost hint leaves one open that only hears topics."""
    _after_commit(BROWSERS, {"type": "live.goodbye", "session": session_key})


def _after_commit(group: str, message: dict[str, Any]) -> None:
    transaction.on_commit(lambda: _sender.send(group, message), robust=True)


class _Sender:
    """The thread that sends. It begins with the first hint, so it is of this process and not of one that forked."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_sending = False

    def send(self, group: str, message: dict[str, Any]) -> None:
        """Returns at once. What waits already waits once."""
        if VALKEY_BREAKER.is_open:
            return
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                _lost(group, f"{MOST_WAITING} others wait")
                return
            self._waiting.setdefault(repr((group, message)), (group, message))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="live-hints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    # Not waiting any more: what changes from here on may be too late for it to tell.
                    group, message = self._waiting.pop(next(iter(self._waiting)))
                    self._is_sending = True
                try:
                    if not VALKEY_BREAKER.is_open:
                        runner.run(_send_in_time(group, message))
                except Exception as error:
                    _lost(group, str(error) or type(error).__name__)
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all are sent or lost, for `SEND_LIMIT_S` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_sending, SEND_LIMIT_S)


_sender = _Sender()
atexit.register(_sender.drain)


def _lost(group: str, why: str) -> None:
    VALKEY_BREAKER.trip()
    log.warning("hint to %s lost, as will be others for %.0f s: %s", group, VALKEY_BREAKER.pause_s, why)


async def _send_in_time(group: str, message: dict[str, Any]) -> None:
    async with asyncio.timeout(SEND_LIMIT_S):
        if (layer := get_channel_layer()) is not None:
            await layer.group_send(group, message)
