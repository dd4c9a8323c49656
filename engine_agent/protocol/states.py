"""States that agents and the control plane both speak of, each declared once.

Nothing here decides when a state changes; planners do that.
"""

from enum import StrEnum


class MemberRole(StrEnum):
    """What a node does in its cell: rank 0 leads, every other rank follows."""

    LEADER = "leader"
    FOLLOWER = "follower"


class Phase(StrEnum):
    """What the control plane wants of a node's engine."""

    SERVE = "serve"
    DRAIN = "drain"
    STOP = "stop"


class EngineState(StrEnum):
    """What an agent observes of the engine that it should run."""

    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class AgentKind(StrEnum):
    NODE = "node"
    INGRESS = "ingress"


class ServingClass(StrEnum):
    """How urgent a request is, most urgent first."""

    REALTIME = "realtime"
    NEAR_REALTIME = "near_realtime"
    BATCH = "batch"
