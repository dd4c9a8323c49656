"""The steps that a node agent can take towards its order. Each says why; none of them does anything by itself."""

from dataclasses import dataclass

from engine_agent.node.planning.node import Membership
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.proxy_messages import Pairs
from engine_agent.protocol.states import Phase


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start the engine of this rank."""

    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class StartProxy:
    """Start the cell proxy beside this leader."""

    assignment: Assignment
    reason: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the engine: ask, and after `grace_s` force."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StopProxy:
    """End the cell proxy: ask, and after `grace_s` force."""

    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SetProxyPhase:
    """Tell the running proxy to serve or to drain."""

    phase: Phase
    reason: str


@dataclass(frozen=True, slots=True)
class SetProxyPairs:
    """Tell the running proxy which cells its own pairs with."""

    pairs: Pairs
    reason: str


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Give up this start of the engine, and keep it given up."""

    membership: Membership
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until_s`, or before something changes if that is None."""

    until_s: float | None
    reason: str


Step = StartEngine | StartProxy | StopEngine | StopProxy | SetProxyPhase | SetProxyPairs | MarkFailed | Wait
