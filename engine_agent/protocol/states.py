"""States that agents and the control plane both speak of, each declared once.

Nothing here decides when a state changes; planners do that.
"""

from enum import StrEnum


class MemberRole(StrEnum):
    """What a node does in its cell: rank 0 leads, every other rank follows."""

    LEADER = "leader"
    FOLLOWER = "follower"


class CellRole(StrEnum):
    """Which part of a request a cell does (docs/design/engines.md#prefill-and-decode-cells)."""

    MIXED = "mixed"
    PREFILL = "prefill"
    """It reads prompts and hands what it computed to decode cells. It is in no routing table."""
    DECODE = "decode"
    """It answers requests, and may have the prompts of long ones read by a prefill cell. Without one it does it all."""


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


class MachineNoticeKind(StrEnum):
    """What a cloud says to a machine itself of what will become of it."""

    INTERRUPTION = "interruption"
    REBALANCE = "rebalance"
    RETIREMENT = "retirement"
    MAINTENANCE = "maintenance"


class AgentKind(StrEnum):
    NODE = "node"
    INGRESS = "ingress"
    MACHINE = "machine"


class MachinePhase(StrEnum):
    """What a machine agent sees on its host."""

    IDLE = "idle"
    """Nothing runs, and nothing is left of what ran."""
    STARTING = "starting"
    RUNNING = "running"
    AGENT_DEAD = "agent_dead"
    """The agent that it runs has ended; it is started again."""
    WIPING = "wiping"
    LEFT = "left"
    """It has stopped and wiped all, and uninstalls itself next."""


class ServingClass(StrEnum):
    """How urgent a request is, most urgent first."""

    REALTIME = "realtime"
    NEAR_REALTIME = "near_realtime"
    BATCH = "batch"


class PlainHttp(StrEnum):
    """Whom an ingress serves on its port without TLS. What is refused is told of the port with it."""

    SERVE = "serve"
    REFUSE = "refuse"
    LOOPBACK = "loopback"
    """Processes of the ingress's own host only."""
