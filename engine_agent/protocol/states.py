"""States and choices that agents and the control plane share. Planners decide when they change."""

from enum import StrEnum


class MemberRole(StrEnum):
    """The role of a node in its cell: rank 0 leads, every other rank follows."""

    LEADER = "leader"
    FOLLOWER = "follower"


class CellRole(StrEnum):
    """The part of a request that a cell serves (docs/design/engines.md#prefill-and-decode-cells)."""

    MIXED = "mixed"
    PREFILL = "prefill"
    """Reads prompts and hands their KV cache to decode cells. It is in no routing table."""
    DECODE = "decode"
    """Answers requests. A prefill cell may read its long prompts; without one it serves requests alone."""


class Phase(StrEnum):
    """The control plane's order for a node's engine."""

    SERVE = "serve"
    DRAIN = "drain"
    STOP = "stop"


class EngineState(StrEnum):
    """An agent's view of its engine."""

    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class MachineNoticeKind(StrEnum):
    INTERRUPTION = "interruption"
    REBALANCE = "rebalance"
    RETIREMENT = "retirement"
    MAINTENANCE = "maintenance"


class AgentKind(StrEnum):
    NODE = "node"
    INGRESS = "ingress"
    MACHINE = "machine"


class MachinePhase(StrEnum):
    """A machine agent's view of its host."""

    IDLE = "idle"
    """Nothing runs, and everything is wiped."""
    STARTING = "starting"
    RUNNING = "running"
    AGENT_DEAD = "agent_dead"
    """Its agent has exited and will be restarted."""
    WIPING = "wiping"
    LEFT = "left"
    """Everything is stopped and wiped; it uninstalls itself next."""


class ServingClass(StrEnum):
    """How urgent a request is, most urgent first."""

    REALTIME = "realtime"
    NEAR_REALTIME = "near_realtime"
    BATCH = "batch"


class PlainHttp(StrEnum):
    """Which clients an ingress serves on its port without TLS. Rejected clients get the TLS port in the error."""

    SERVE = "serve"
    REFUSE = "refuse"
    LOOPBACK = "loopback"
    """Only processes of the ingress's own host."""
