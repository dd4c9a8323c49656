"""Which request caused each node's next order, for logs and traces."""

from collections import OrderedDict
from typing import Any

import msgspec

from engine_agent.protocol.messages import Cause, Desired, DownMessage

CAUSES_KEPT = 20_000


class PendingCauses:
    """Of which request each node's next order came, as doorbells state it. For logs and traces only: losing one costs
    nothing."""

    def __init__(self) -> None:
        self._by_node: OrderedDict[str, Cause] = OrderedDict()

    def record(self, hint: dict[str, Any]) -> None:
        """Keep the cause that a doorbell's message states, if any."""
        stated = hint.get("cause")
        if not isinstance(stated, dict) or not stated.get("request_id"):
            return
        cause = Cause(str(stated["request_id"])[:64], str(stated.get("traceparent", ""))[:64])
        for node in hint.get("nodes", ()):
            self._by_node[str(node)] = cause
            self._by_node.move_to_end(str(node))
        while len(self._by_node) > CAUSES_KEPT:
            self._by_node.popitem(last=False)

    def attach(self, node: str, message: DownMessage) -> DownMessage:
        """The message with the node's cause, which is used up by it."""
        cause = self._by_node.pop(node, None)
        return msgspec.structs.replace(message, cause=cause) if cause and isinstance(message, Desired) else message
