"""Hints to browsers and to the processes that hold agents' sockets: "look again at X". Never the content itself.

They travel after the commit and may be lost; whoever listens also polls slowly. A hint never holds up its caller for
longer than `SEND_LIMIT_S`.
"""

import asyncio
import logging

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction

from kernel.circuit_breaker import DOORBELLS
from kernel.request_id import request_id
from kernel.tracing import traceparent

SEND_LIMIT_S = 1.0
"""A server in reach takes a few milliseconds."""
BROWSERS = "browsers"
AGENT_SOCKETS = "agent-sockets"

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


def push_goodbye(session_key: str) -> None:
    """Close the WebSockets of a session that has ended. A lost hint leaves one open that only hears topics."""
    _after_commit(BROWSERS, {"type": "live.goodbye", "session": session_key})


def _after_commit(group: str, message: dict[str, object]) -> None:
    transaction.on_commit(lambda: _send(group, message), robust=True)


def _send(group: str, message: dict[str, object]) -> None:
    if DOORBELLS.is_open or get_channel_layer() is None:
        return
    try:
        async_to_sync(_send_in_time)(group, message)
    except Exception as error:
        DOORBELLS.trip()
        why = str(error) or type(error).__name__
        log.warning("hint to %s lost, as will be others for %.0f s: %s", group, DOORBELLS.pause_s, why)


async def _send_in_time(group: str, message: dict[str, object]) -> None:
    async with asyncio.timeout(SEND_LIMIT_S):
        await get_channel_layer().group_send(group, message)
