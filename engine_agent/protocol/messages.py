"""Every message between an agent and the control plane, defined once for both sides. Messages about ingresses are in
`ingress_messages`, about machines in `machine_messages`; a node's report contains `load_messages` and
`telemetry_messages`. Messages carry state instead of commands. Losing, repeating or reordering one is harmless, because
the next message contains everything again. Units are in the field names: `_s` seconds, `_ms` milliseconds, `_bytes`
bytes."""

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from engine_agent.protocol.engine_builds import EngineBuild
from engine_agent.protocol.ingress_messages import ApplicationTls, IngressReport, RoutingTable, TablePart
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.machine_messages import MachineFacts, MachineOrder, MachineReport
from engine_agent.protocol.request_bodies import Modality
from engine_agent.protocol.request_messages import RequestWindow
from engine_agent.protocol.states import AgentKind, CellRole, EngineState, MemberRole, Phase
from engine_agent.protocol.telemetry_messages import NodeTelemetry

PROTOCOL_VERSION = 3
"""Rises with every change that the other side would misread: a removed or renamed field, or one without a default.
Older sides ignore new fields with defaults. See docs/design/agents.md#protocol."""
PROTOCOLS_SPOKEN = (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
"""Protocols of agents that the control plane serves: its own, and the previous one during an upgrade of the agents."""

JsonObject = dict[str, Any]


class Artifact(Struct, frozen=True, forbid_unknown_fields=False):
    """A stored artifact: `uri` is `file:///…` or `s3://…`, `digest` is `sha256:<hex>` of its manifest."""

    uri: str
    digest: str


class GoldenPrompt(Struct, frozen=True):
    """A prompt whose greedy answer must contain `expect`. It proves that a cell serves its version."""

    prompt: str
    expect: str


class PlanAdapter(Struct, frozen=True):
    """A LoRA adapter: its name in requests, and its weights; None: it has no weights (`sim`)."""

    name: str
    artifact: Artifact | None = None


class EnginePlan(Struct, frozen=True):
    """How to run the engine of a cell. Rendered from a model version by pure code; the same on every rank.

    `args` and `env` are the engine's own; the agent's adapter adds what only the node knows (ports, rank, paths).
    `max_concurrency` is the number of requests that the cell runs concurrently; the ingress queues the rest. `draft`
    are the weights of a smaller model that predicts tokens for speculative decoding; `args` refer to it by its URI.
    `adapters` are served next to the model. `build` has the engine; None: the one that is installed on the node.
    `widened`: names in `args` and `env` that an admin allowed in addition to
    `engine_agent.protocol.engine_options`. `modalities`: content of requests that the cell serves in addition to text;
    its proxy refuses other content."""

    engine: str
    served_model: str
    max_concurrency: int
    ready_timeout_s: float
    artifact: Artifact | None = None
    draft: Artifact | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    golden: tuple[GoldenPrompt, ...] = ()
    widened: tuple[str, ...] = ()
    adapters: tuple[PlanAdapter, ...] = ()
    build: EngineBuild | None = None
    modalities: tuple[Modality, ...] = ()

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """All artifacts that a node needs before its engine starts."""
        of_adapters = (adapter.artifact for adapter in self.adapters)
        return tuple(each for each in (self.artifact, self.draft, *of_adapters) if each is not None)


class Peer(Struct, frozen=True):
    """One member of a cell. A node's ports are `port_base` plus the offsets in `engine_agent.protocol.ports`."""

    node: str
    rank: int
    address: str
    port_base: int


class PrefillCell(Struct, frozen=True):
    """One start of a prefill cell, as the proxy of a decode cell calls it. `node`: its leader, whose certificate its
    proxy must show. `host` and `port` are its proxy's; `kv_port` on the same host is where its engine hands over the KV
    cache. `max_concurrency`: requests that it runs concurrently."""

    cell: str
    generation: int
    node: str
    host: str
    port: int
    kv_port: int
    kv_layout: str
    max_concurrency: int


PREFILL_CELLS_MAX = 64
"""Prefill cells of one decode cell. More are useless for its `max_concurrency`, and an order stays short."""
DECODE_NODES_MAX = 512
PREFILL_FROM_TOKENS = 512
"""Default: 64 ms of the default 70B model, the time of three decode steps of all other requests."""


class Assignment(Struct, frozen=True):
    """A node's place in a cell. Orders bind to (cell, generation): lower generations are rejected, equal ones change
    nothing.

    `secret` is shared by the members of one generation and authenticates them to each other. `drain_deadline_s` limits
    requests in flight after `phase` becomes `drain`.

    `kv_layout` is the fingerprint of the KV cache that cells hand over: digest of the model, its data type, block size
    and data type of the cache, how tensors are split, connector and its version. Empty: no handover. Two cells pair
    only if theirs are equal. `prefill_cells` are those that a decode cell may call; `decode_nodes` are the leaders of
    the decode cells that may call this prefill cell. A prefill cell reads prompts with `prefill_from_tokens` or more
    uncached tokens. These three may change within a generation, without a restart."""

    cell: str
    generation: int
    rank: int
    role: MemberRole
    phase: Phase
    plan: EnginePlan
    peers: tuple[Peer, ...]
    secret: str
    drain_deadline_s: float = 60.0
    cell_role: CellRole = CellRole.MIXED
    kv_layout: str = ""
    prefill_cells: Annotated[tuple[PrefillCell, ...], Meta(max_length=PREFILL_CELLS_MAX)] = ()
    decode_nodes: Annotated[tuple[str, ...], Meta(max_length=DECODE_NODES_MAX)] = ()
    prefill_from_tokens: Annotated[int, Meta(ge=1)] = PREFILL_FROM_TOKENS


class Inventory(Struct, frozen=True):
    """The hardware of a machine, as its agent sees it."""

    instance_type: str
    address: str
    port_base: int
    cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] = ()


HOLDERS_MAX = 3
"""Nodes that are named for one artifact."""


class Holder(Struct, frozen=True):
    """A node that holds an artifact or a part of it, in the answer to `GET /agents/holders/SHA256`."""

    node: str
    address: str
    port_base: int


class StepTimes(Struct, frozen=True):
    """The decode steps that this rank computed since its engine started, without waiting for others. Both map a bucket
    of `engine_agent.protocol.metrics` to a sum; empty buckets are left out."""

    steps: dict[int, int] = field(default_factory=dict)
    compute_ms: dict[int, float] = field(default_factory=dict)


class Health(Struct, frozen=True):
    """Why a node's engine counts as healthy or not. `checked_s_ago` is the age of the latest probe. `wrong`: the engine
    answers, but not as its version must, and another probe will not change that."""

    ok: bool
    reason: str = ""
    probe_ms: float | None = None
    checked_s_ago: float | None = None
    wrong: bool = False


class Observed(Struct, frozen=True):
    """The process state of a node. `engine_pid` shows that an engine survived a restart of the agent."""

    state: EngineState
    cell: str | None = None
    generation: int = 0
    rank: int | None = None
    reason: str = ""
    engine_pid: int | None = None


# --- up: agent -> control plane -------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag="hello"):
    """First message of every connection. `machine`: facts of the host, from machine agents only."""

    protocol: int
    kind: AgentKind
    id: str
    boot_id: str
    agent_version: str
    inventory: Inventory | None = None
    topology: tuple[str, ...] = ()
    fingerprint: dict[str, str] = field(default_factory=dict)
    machine: MachineFacts | None = None


class Report(Struct, frozen=True, tag="report"):
    """A node's complete state. The latest counts; `seq` grows by one with every report of a connection."""

    seq: int
    observed: Observed
    health: Health | None = None
    load: Load | None = None
    telemetry: NodeTelemetry = field(default_factory=NodeTelemetry)
    steps: StepTimes | None = None


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Sent instead of a report while a node's state stays the same (`engine_agent.node.planning.heartbeats`). `seq`: of
    the last report on this connection, which still holds."""

    seq: int


SIGNATURE_CHARS_MAX = 64
SUMMARY_CHARS_MAX = 2000


class Fault(Struct, frozen=True, tag="fault"):
    """Evidence of a fault, sent once when it is noticed; the next report repeats the resulting state. It is stored
    permanently, so its size is limited (`engine_agent.protocol.codec.FAULT_BYTES_MAX`)."""

    signature: Annotated[str, Meta(max_length=SIGNATURE_CHARS_MAX)]
    summary: Annotated[str, Meta(max_length=SUMMARY_CHARS_MAX)]
    evidence: JsonObject = field(default_factory=dict)


class LogTail(Struct, frozen=True, tag="log_tail"):
    """The last lines of a node's logs, oldest first, complete: sent while a `LogRequest` is in force; the latest
    counts. `logs` maps `agent`, `engine` and `proxy` to lines with secrets removed."""

    cell: str | None
    generation: int
    logs: dict[str, tuple[str, ...]]


CERTIFICATE_REQUEST_CHARS_MAX = 16 * 1024


class CertificateRequest(Struct, frozen=True, tag="certificate_request"):
    """Requests a certificate for the agent's own name. `request` is PKCS #10 as PEM, of which only the key counts;
    `believed` the SHA-256, in hexadecimal, of its bundle of authorities."""

    request: Annotated[str, Meta(max_length=CERTIFICATE_REQUEST_CHARS_MAX)]
    believed: Annotated[str, Meta(max_length=64)] = ""


UpMessage = (
    Hello | Report | Heartbeat | IngressReport | MachineReport | Fault | LogTail | RequestWindow | CertificateRequest
)


# --- down: control plane -> agent -----------------------------------------------------------------------------------


class LogRequest(Struct, frozen=True):
    """A user reads this node's logs: the agent sends their last lines until `until`, in seconds since 1970. `lines`:
    the most of each log."""

    until: float
    lines: int = 200


class CheckRequest(Struct, frozen=True, omit_defaults=True):
    """Requests deep checks of a node, once. `peers`: the nodes, including this one, whose links it checks, by rank;
    `secret` authenticates them to each other. A node that serves checks only its memory and its disk. `reset`: devices
    to reset before, by UUID or as `neuron 3`; empty: all of the node; None: none."""

    id: Annotated[str, Meta(max_length=64)]
    rank: int = 0
    peers: Annotated[tuple[Peer, ...], Meta(max_length=32)] = ()
    secret: str = ""
    reset: Annotated[tuple[str, ...], Meta(max_length=64)] | None = None


class Cause(Struct, frozen=True, omit_defaults=True):
    """What caused an order, for logs and traces only: the id of a request, and its W3C `traceparent`."""

    request_id: str = ""
    traceparent: str = ""


PREFETCH_MAX = 32


class Prefetch(Struct, frozen=True, omit_defaults=True):
    """Builds and weights that a node fetches in advance, one after the other, and then keeps."""

    builds: Annotated[tuple[EngineBuild, ...], Meta(max_length=PREFETCH_MAX)] = ()
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=PREFETCH_MAX)] = ()


class Desired(Struct, frozen=True, tag="desired", omit_defaults=True):
    """The complete desired state of a node. `assignment` None: the node is a spare and runs no engine. `logs` None: no
    user reads them. `check`: the last requested deep checks. `cause` is not part of the order: the same order may come
    with another one or with none. `prefetch` None: nothing is fetched in advance."""

    node: str
    version: int
    assignment: Assignment | None
    logs: LogRequest | None = None
    cause: Cause | None = None
    check: CheckRequest | None = None
    prefetch: Prefetch | None = None


class Trust(Struct, frozen=True, tag="trust"):
    """All valid authorities and their revocation lists, as PEM. Sent on every connection, and when they change.
    `servers`: every address at which the control plane serves agents; empty: unchanged."""

    bundle: str
    revoked: str
    servers: tuple[str, ...] = ()


class Certificate(Struct, frozen=True, tag="certificate"):
    """Answers a `CertificateRequest`: the certificate as PEM, leaf first, and the authorities from then on."""

    chain: str
    trust: Trust


class Credential(Struct, frozen=True, tag="credential"):
    """A new credential for future connections. The previous one is valid until the new one is used."""

    credential: str


class Refused(Struct, frozen=True, tag="refused"):
    """Why the control plane is about to close the connection. `retry` False: an operator must act first."""

    reason: str
    retry: bool = True


Order = Desired | RoutingTable | ApplicationTls | MachineOrder
"""The complete desired state for an agent; each kind of agent has its own."""
DownMessage = Order | TablePart | Trust | Certificate | Credential | Refused
