"""Hints to browsers and to the processes that hold agents' sockets: "look again at X". Never the content itself.

They travel after the commit and may be lost; whoever listens also polls slowly.
"""

import logging

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction

BROWSERS = "browsers"
AGENT_SOCKETS = "agent-sockets"

log = logging.getLogger(__name__)


def push(topic: str, key: str = "") -> None:
    """Tell browsers that a topic (`cells`, `nodes`, `events`, …) changed; `key` names the one thing, if one."""
    _after_commit(BROWSERS, {"type": "live.hint", "topic": topic, "key": key})


def push_desired(node_ids: list[str]) -> None:
    """Tell the processes that hold agents' sockets that the desired state of these nodes changed."""
    _after_commit(AGENT_SOCKETS, {"type": "agent.desired", "nodes": node_ids})


def push_table(region: str) -> None:
    """Tell the processes that hold ingresses' sockets that a region's routing table has a new revision."""
    _after_commit(AGENT_SOCKETS, {"type": "agent.table", "region": region})


def _after_commit(group: str, message: dict[str, object]) -> None:
    transaction.on_commit(lambda: _send(group, message), robust=True)


def _send(group: str, message: dict[str, object]) -> None:
    layer = get_channel_layer()
    if layer is None:
        return
    try:
        async_to_sync(layer.group_send)(group, message)
    except Exception as error:
        log.warning("hint to %s lost: %s", group, error)
