"""State of the hub: whether it keeps up with its agents, and which request caused each node's next order."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_agent.protocol.messages import Cause, Desired, DownMessage

LAG_MOST_S = 1.5
"""Of the event loop: longer, and reports wait in socket buffers for as long as a report's interval."""
UNANSWERED_MOST_S = 2.0
"""How long a credential or a hello may wait for the database."""
UNSTORED_MOST_S = 3.0
"""How long reports may wait to be stored: one report is missed then."""
SETTLES_WITHIN_S = 5.0
"""The longest pause of an agent between two tries: who was turned away has come again by then."""
BEHIND_MOST_S, RESTORED_PER_S = 120.0, 0.1
"""After so long it counts as keeping up, until that is restored by ten times as long without delays: overload that
lasts or comes again and again is no storm, and must not hide dead nodes."""


@dataclass(frozen=True, slots=True)
class Delays:
    """What a web process measures of itself, in seconds. `turned_away`: agents were told to come again, and the last
    of them is still to come."""

    lag_s: float = 0.0
    unanswered_s: float = 0.0
    unstored_s: float = 0.0
    turned_away: bool = False

    @property
    def are_long(self) -> bool:
        return (
            self.turned_away
            or self.lag_s > LAG_MOST_S
            or self.unanswered_s > UNANSWERED_MOST_S
            or self.unstored_s > UNSTORED_MOST_S
        )


class Backlog:
    def __init__(self) -> None:
        self._is_behind = False
        self._last_delay_s = 0.0
        self._measured_s: float | None = None
        self._excuse_left_s = BEHIND_MOST_S

    def keeps_up(self, delays: Delays, now_s: float) -> bool:
        """Whether the silence of an agent of this process counts, given the newest measurement."""
        passed_s = now_s - (now_s if self._measured_s is None else self._measured_s)
        self._measured_s = now_s
        restored_s = -passed_s if self._is_behind else RESTORED_PER_S * passed_s
        self._excuse_left_s = min(max(self._excuse_left_s + restored_s, 0.0), BEHIND_MOST_S)
        if delays.are_long:
            self._last_delay_s = now_s
        self._is_behind = delays.are_long or (self._is_behind and now_s - self._last_delay_s < SETTLES_WITHIN_S)
        return not self._is_behind or self._excuse_left_s <= 0.0


# Which request caused each node's next order, for logs and traces.

CAUSES_KEPT = 20_000


class PendingCauses:
    """The request that caused each node's next order, as wake-ups state it. Only for logs and traces."""

    def __init__(self) -> None:
        self._by_node: OrderedDict[str, Cause] = OrderedDict()

    def record(self, hint: dict[str, Any]) -> None:
        """Keep the cause that a wake-up states, if any."""
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
