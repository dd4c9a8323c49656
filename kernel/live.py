"""Hints to browsers and to the processes with agents' sockets that something has changed, never the content.

They are sent after the commit and may be lost; receivers also poll slowly. A separate thread sends them over one
connection, so they delay no caller: a pass over a large fleet may send hundreds."""

import asyncio
import atexit
import logging
import threading
from typing import Any

from channels.layers import get_channel_layer
from channels_redis.pubsub import RedisPubSubChannelLayer, RedisSingleShardConnection
from django.db import transaction

from kernel.circuit_breaker import VALKEY_BREAKER
from kernel.tracing import request_id, traceparent

SEND_LIMIT_S = 1.0
"""For one hint; a reachable server takes milliseconds. Also the time that an exiting process waits for its last
hints."""
MOST_WAITING = 1000
"""Maximum number of unsent hints of one process; further ones are lost."""
BROWSERS = "browsers"
AGENT_SOCKETS = "agent-sockets"
TRUST_CHANGED = "agent.trust"

RECEIVE_FOR_S, AFTER_ERROR_S, SUBSCRIBED_POLL_S = 1.0, 1.0, 0.1

log = logging.getLogger(__name__)


class WaitingConnection(RedisSingleShardConnection):  # type: ignore[misc]
    """Waits for messages a second at a time; the base class takes 0.1 s, and a tenth of an idle web process."""

    async def _do_receiving(self) -> None:
        while True:
            try:
                if not self._pubsub.subscribed:
                    await asyncio.sleep(SUBSCRIBED_POLL_S)
                    continue
                message = await self._pubsub.get_message(ignore_subscribe_messages=True, timeout=RECEIVE_FOR_S)
                self._receive_message(message)
            except Exception:
                log.exception("hints cannot be received")
                await asyncio.sleep(AFTER_ERROR_S)


class ChannelLayer(RedisPubSubChannelLayer):  # type: ignore[misc]
    """The channel layer of hints, with these connections."""

    def _get_layer(self) -> Any:
        layer = super()._get_layer()
        if not all(isinstance(each, WaitingConnection) for each in layer._shards):
            layer._shards = [WaitingConnection(each.host, layer) for each in layer._shards]
        return layer


def push(topic: str, key: str = "") -> None:
    """Hint to browsers that a topic (`cells`, `nodes`, `events`, …) changed, or the one object `key`."""
    _after_commit(BROWSERS, {"type": "live.hint", "topic": topic, "key": key})


def push_desired(node_ids: list[str]) -> None:
    """Hint that the orders of these nodes changed, with the request that caused it."""
    cause = {"cause": {"request_id": request_id(), "traceparent": traceparent()}} if request_id() else {}
    _after_commit(AGENT_SOCKETS, {"type": "agent.desired", "nodes": node_ids, **cause})


def push_table(region: str) -> None:
    """Hint that a region's routing table has a new revision."""
    _after_commit(AGENT_SOCKETS, {"type": "agent.table", "region": region})


def push_trust() -> None:
    """Hint that authorities or revocation lists changed."""
    _after_commit(AGENT_SOCKETS, {"type": TRUST_CHANGED})


def push_goodbye(session_key: str) -> None:
    """Close the WebSockets of a session that has ended. After a lost hint one stays open, which receives only
    topics."""
    _after_commit(BROWSERS, {"type": "live.goodbye", "session": session_key})


def _after_commit(group: str, message: dict[str, Any]) -> None:
    transaction.on_commit(lambda: _sender.send(group, message), robust=True)


class _Sender:
    """The sending thread. It starts with the first hint, because threads do not survive a fork."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_sending = False

    def send(self, group: str, message: dict[str, Any]) -> None:
        """Queues a hint, equal ones only once, and returns immediately."""
        if VALKEY_BREAKER.is_open:
            return
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                _lost(group, f"{MOST_WAITING} hints are waiting")
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
                    # Removed before it is sent: a later change needs a new hint.
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
    log.warning("hint to %s lost; none is sent for %.0f s: %s", group, VALKEY_BREAKER.pause_s, why)


async def _send_in_time(group: str, message: dict[str, Any]) -> None:
    async with asyncio.timeout(SEND_LIMIT_S):
        if (layer := get_channel_layer()) is not None:
            await layer.group_send(group, message)
