"""Of which request an order came, as doorbells tell it, until the order is sent. For logs and traces only: what is lost
here is missed by nobody."""

from collections import OrderedDict
from typing import Any

import msgspec

from engine_agent.protocol.messages import Cause, Desired, DownMessage

MOST_KEPT = 20_000
"""Nodes; the oldest give way."""


class Causes:
    """The newest cause of each node's order."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Cause] = OrderedDict()

    def note(self, hint: dict[str, Any]) -> None:
        """Take in a doorbell's message, if it tells a cause."""
        given = hint.get("cause")
        if not isinstance(given, dict) or not given.get("request_id"):
            return
        cause = Cause(str(given["request_id"])[:64], str(given.get("traceparent", ""))[:64])
        for node in hint.get("nodes", ()):
            self._of[str(node)] = cause
            self._of.move_to_end(str(node))
        while len(self._of) > MOST_KEPT:
            self._of.popitem(last=False)

    def told(self, node: str, message: DownMessage) -> DownMessage:
        """The message with its cause, which is forgotten then."""
        cause = self._of.pop(node, None)
        return msgspec.structs.replace(message, cause=cause) if cause and isinstance(message, Desired) else message
