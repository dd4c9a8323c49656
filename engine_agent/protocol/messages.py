"""Every message that crosses the wire between an agent and the control plane, defined once and used by both sides.
Those about ingresses are in `ingress_messages`, those about machines in `machine_messages`.

Messages carry state, not commands: losing, repeating or reordering one is harmless, because the next one
says everything again. Units are in the field names: `_s` seconds, `_ms` milliseconds, `_bytes` bytes.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from engine_agent.protocol.ingress_messages import ApplicationTls, IngressReport, RoutingTable, TablePart
from engine_agent.protocol.machine_messages import MachineFacts, MachineOrder, MachineReport
from engine_agent.protocol.states import AgentKind, CellRole, EngineState, MachineNoticeKind, MemberRole, Phase

PROTOCOL_VERSION = 2
"""Rises with every change of a message's shape; see docs/design/agents.md#releases."""
PROTOCOLS_SPOKEN = (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
"""Of agents that the control plane serves: its own, and the one before for as long as agents are upgraded."""

JsonObject = dict[str, Any]


class Artifact(Struct, frozen=True, forbid_unknown_fields=False):
    """Weights as they lie somewhere: `uri` is `file:///…` or `s3://…`, `digest` is `sha256:<hex>` of the manifest."""

    uri: str
    digest: str


class GoldenPrompt(Struct, frozen=True):
    """A prompt whose greedy answer must contain `expect`: the proof that a cell serves what its version says."""

    prompt: str
    expect: str


class PlanAdapter(Struct, frozen=True):
    """A LoRA adapter: the name that requests call it by, and its weights; None: there are none (`sim`)."""

    name: str
    artifact: Artifact | None = None


class EnginePlan(Struct, frozen=True):
    """How to run the engine of a cell. Rendered from a model version by pure code; the same on every rank.

    `args` and `env` are the engine's own; the agent's adapter adds what only the node knows (ports, rank, paths).
    `max_concurrency` is the number of requests that the cell runs at once; the ingress queues the rest. `draft` holds
    the weights of a second, smaller model that guesses tokens for the first; `args` name it as if it lay at its URI.
    `adapters` are served beside the model. `widened`: which names in `args` and `env` an admin allowed beyond
    `engine_agent.protocol.engine_options`.
    """

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

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """All that a node must have before its engine starts."""
        of_adapters = (adapter.artifact for adapter in self.adapters)
        return tuple(each for each in (self.artifact, self.draft, *of_adapters) if each is not None)


class Peer(Struct, frozen=True):
    """One member of a cell. A node's ports are `port_base` plus the offsets in `engine_agent.protocol.ports`."""

    node: str
    rank: int
    address: str
    port_base: int


class PrefillCell(Struct, frozen=True):
    """One start of a prefill cell as the proxy of a decode cell calls it, with requests for its prompts.

    `node`: its leader, whose certificate its proxy must show. `host` and `port` are its proxy's; `kv_port`, on the same
    host, is where its engine hands over what it computed. `max_concurrency`: requests that it has at once.
    """

    cell: str
    generation: int
    node: str
    host: str
    port: int
    kv_port: int
    kv_layout: str
    max_concurrency: int


PREFILL_CELLS_MAX = 64
"""Of one decode cell: more have no use for its `max_concurrency`, and an order stays short."""
DECODE_NODES_MAX = 512
PREFILL_FROM_TOKENS = 512
"""Unless an order says otherwise: 64 ms of the default 70B model, in which three tokens of everybody else are due."""


class Assignment(Struct, frozen=True):
    """A node's place in a cell. Orders bind to (cell, generation): lower ones are refused, equal ones no-ops.

    `secret` is shared by the members of one generation and authenticates them to each other.
    `drain_deadline_s` is how long requests in flight may take once `phase` is `drain`.

    `kv_layout` is the fingerprint of what cells hand over: digest of the model, its data type, block size and data type
    of the KV cache, how tensors are split, connector and its version. Empty: nothing is. Two cells pair only if theirs
    are equal. `prefill_cells` are those that a decode cell may call; `decode_nodes` the leaders of the decode cells
    that may call this prefill cell. Prompts of which a decode cell would have to read `prefill_from_tokens` or more are
    read by a prefill cell. These three change within a generation, while all processes run on.
    """

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
    """What the machine is, as its agent sees it."""

    instance_type: str
    address: str
    port_base: int
    cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] = ()


class ClassLoad(Struct, frozen=True):
    """One serving class's part of a cell's load. `refused_total` are those that admission sent away."""

    in_flight: int = 0
    requests_total: int = 0
    errors_total: int = 0
    refused_total: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None


class BatchLoad(Struct, frozen=True, omit_defaults=True):
    """A cell's batch requests, in its engine and before it. `window`: so many may be in the engine, by what real-time
    requests feel; `is_alone`: there are none, and it is not in force.

    `baseline_…` are 95th percentiles of real-time requests without batch work, as learnt by now; `recent_…` the average
    with it, since it began or the window shrank; None: not known.
    """

    running: int = 0
    waiting: int = 0
    window: int = 0
    is_alone: bool = False
    is_over_budget: bool = False
    baseline_ttft_ms: float | None = None
    baseline_itl_ms: float | None = None
    recent_ttft_ms: float | None = None
    recent_itl_ms: float | None = None


class CacheLoad(Struct, frozen=True, omit_defaults=True):
    """What a cell's engine says of its prefix cache, and how well that was used. `is_known` False: it does not say.

    `blocks` of `block_tokens` tokens are there; `prefixes` of requests are listed for ingresses. Of requests that an
    ingress sent here by that list, `asked_tokens_total` are those of their prompts, `predicted_tokens_total` those that
    were to be found, and `found_tokens_total` those that the engine found. `other_found_tokens_total` were found for
    `other_tokens_total` of requests that came by any other rule.
    """

    is_known: bool = False
    blocks: int = 0
    block_tokens: int = 0
    prefixes: int = 0
    asked_tokens_total: int = 0
    predicted_tokens_total: int = 0
    found_tokens_total: int = 0
    other_tokens_total: int = 0
    other_found_tokens_total: int = 0


class UsageRow(Struct, frozen=True, omit_defaults=True):
    """What one key of one tenant used of a cell in one class, of the model itself or of one adapter. Its totals began
    at 0 at `since`, in seconds since 1970.

    A reader who knows totals of another `since` adds these to them: the proxy is another, or had forgotten the row.
    `tenant` is empty where no key was needed, `key` (its prefix) where none was shown. A request is in the totals of
    tokens once it has ended. `cached_tokens_total` are part of `prompt_tokens_total`. `cancelled_total`: requests that
    their client, their deadline or the end of their cell cut short. `errors_total`: those that the cell failed.
    `estimated_total`: requests of which no engine said what they used, so that their tokens are estimates.
    """

    since: float
    tenant: str = ""
    key: str = ""
    serving_class: str = "realtime"
    adapter: str = ""
    in_flight: int = 0
    requests_total: int = 0
    cancelled_total: int = 0
    errors_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    estimated_total: int = 0


class TokenCheck(Struct, frozen=True):
    """Tokens by two counts, from `since` (seconds since 1970) to one instant at which no request of a client was in
    flight: by how much the engine's own metrics grew, without the probes of its proxy, and what that proxy counted."""

    since: float
    engine_prompt_total: int = 0
    engine_completion_total: int = 0
    counted_prompt_total: int = 0
    counted_completion_total: int = 0


class CellWork(Struct, frozen=True):
    """What the engine of a cell computed while requests were in flight, in totals from `since` (seconds since 1970) on:
    `busy_ms` as its proxy saw it, and by the engine's own metrics its steps and the tokens in them. `cached_tokens` are
    part of `prompt_tokens`."""

    since: float
    busy_ms: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class HandoverLoad(Struct, frozen=True, omit_defaults=True):
    """What a cell handed over or took over, since its proxy started.

    Of a decode cell: `handovers_total` requests whose prompts a prefill cell read, `in_flight` those under way until
    their first token; `alone` requests that it did alone by its rules, and `fallbacks` those that it did alone because
    a prefill cell failed it, both by reason. Times are of the last 30 s: `prefill_…` until a prefill cell had answered,
    `transfer_…` from there to the first byte of the answer. None: no samples.
    Of a prefill cell: `prefills_total` prompts read for decode cells, `prefill_tokens_total` in them.
    """

    handovers_total: int = 0
    in_flight: int = 0
    alone: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    prefill_p50_ms: float | None = None
    prefill_p99_ms: float | None = None
    transfer_p50_ms: float | None = None
    transfer_p99_ms: float | None = None
    prefills_total: int = 0
    prefill_tokens_total: int = 0


class SpeculationLoad(Struct, frozen=True):
    """What the engine of a cell guessed over the last `covered_s`, some hour at most, by its own metrics: `drafts`, one
    for each sequence in each step that guessed; their `guessed_tokens`, and those that the model accepted."""

    covered_s: float
    drafts: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


MAX_TENANTS_REPORTED = 128
"""Rows of usage in a cell's load without those of `OTHER_TENANTS`: at 300 bytes each well below a frame's limit."""
OTHER_TENANTS = "~others"
"""The tenant of the rows, one for each class, that all use beyond that shares; no tenant can be called so."""


class Load(Struct, frozen=True):
    """Load of one cell as its proxy measured it. Percentiles and rates cover the last 30 s; None: no samples.

    `…_total` and `…_counts` count since the proxy started; `…_counts` maps a bucket of
    `engine_agent.protocol.metrics` to the number of samples in it, without the empty ones. `classes` and `usage`
    have only those that sent something. `tenants` comes from agents of the release before, which have no `usage`.
    `token_check` None: the engine has no counters of tokens, or was never idle yet. `work` None: it counts no steps.
    `batch` and `cache` None: an agent of the release before. `handovers` None: the cell is `mixed`. `speculation`
    None: nothing was guessed in the last hour. `handed_back_total`: of the errors, those without a byte of an answer.
    The ingress tries such a request elsewhere, and counts it if that fails.
    """

    in_flight: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    requests_total: int = 0
    errors_total: int = 0
    ttft_counts: dict[int, int] = field(default_factory=dict)
    itl_counts: dict[int, int] = field(default_factory=dict)
    classes: dict[str, ClassLoad] = field(default_factory=dict)
    usage: tuple[UsageRow, ...] = ()
    token_check: TokenCheck | None = None
    work: CellWork | None = None
    batch: BatchLoad | None = None
    handovers: HandoverLoad | None = None
    cache: CacheLoad | None = None
    speculation: SpeculationLoad | None = None
    handed_back_total: int = 0


class Accelerator(Struct, frozen=True):
    """One device and its use. `errors` counts since its driver was loaded, by the maker's names; None: not known."""

    index: int
    kind: str
    name: str
    cores: int | None = None
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    errors: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.kind} {self.index}: {self.name}"]
        parts += [f"{self.cores} cores"] if self.cores is not None else []
        parts += [f"{self.memory_total_bytes / 2**30:.0f} GiB"] if self.memory_total_bytes is not None else []
        return ", ".join(parts)


class EnergyMeter(Struct, frozen=True, omit_defaults=True):
    """What counters of one part of a machine added up since their reader began, which `since` names.

    `covers`: `accelerators` or `host`. `microjoules` within `covered_ms`; `full_power_ms`: of devices that tell their
    power as a share of the most, the time at full power that would have taken as much. `refused`: readings that could
    not be so, in none of these.
    """

    name: str
    covers: str
    since: str
    microjoules: int = 0
    full_power_ms: int = 0
    covered_ms: int = 0
    refused: int = 0


class MachineNotice(Struct, frozen=True, omit_defaults=True):
    """A machine's cloud says that it will take or touch it. `ends_at`: when, in seconds since 1970; None: not said."""

    kind: MachineNoticeKind
    ends_at: float | None = None


class NetworkDevice(Struct, frozen=True, omit_defaults=True):
    """A device by which nodes reach each other's memory (EFA). `state` of its port: `ACTIVE`, or empty where it is not
    said. `errors` counts as long as the device lives, by the driver's names."""

    name: str
    state: str = ""
    errors: dict[str, int] = field(default_factory=dict)


CHECKS_MAX = 32


class CheckResult(Struct, frozen=True, omit_defaults=True):
    """The result of one deep check (`engine_agent.node.checks.result.Result`). `ok` is None if it was not made."""

    check: Annotated[str, Meta(max_length=64)]
    ok: bool | None
    found: Annotated[str, Meta(max_length=400)]
    wanted: Annotated[str, Meta(max_length=400)] = ""
    seconds: float = 0.0
    numbers: Annotated[dict[str, float], Meta(max_length=16)] = field(default_factory=dict)


class CheckReport(Struct, frozen=True, omit_defaults=True):
    """The deep checks that a node made last, or makes now. `request`: which it was told to, or `joining`. Times are
    seconds since 1970 by its clock; `ended_at` None: they still go on."""

    request: Annotated[str, Meta(max_length=64)]
    began_at: float
    ended_at: float | None = None
    results: Annotated[tuple[CheckResult, ...], Meta(max_length=CHECKS_MAX)] = ()


class NodeTelemetry(Struct, frozen=True, omit_defaults=True):
    """Use of a node and of its accelerators, and what its agent has trouble with; None and empty: nothing to report.

    `accelerator_trouble`: by maker, why its devices may be old or missing. `refused_order`: why the last order that
    was refused was. `journal_error`: why the agent cannot write its journal. `notices`: what the machine's cloud says
    of it, one of each kind; None: it is in no cloud, or its metadata cannot be read. `energy`: what is known of power.
    `checks`: what its deep checks found; None: it made none. `network`: devices of EFA.
    """

    host_cpu_percent: float | None = None
    host_memory_used_bytes: int | None = None
    agent_rss_bytes: int | None = None
    engine_rss_bytes: int | None = None
    accelerators: tuple[Accelerator, ...] = ()
    accelerator_trouble: dict[str, str] = field(default_factory=dict)
    refused_order: str = ""
    journal_error: str = ""
    notices: Annotated[tuple[MachineNotice, ...], Meta(max_length=len(MachineNoticeKind))] | None = None
    energy: Annotated[tuple[EnergyMeter, ...], Meta(max_length=8)] = ()
    checks: CheckReport | None = None
    network: Annotated[tuple[NetworkDevice, ...], Meta(max_length=64)] = ()


class StepTimes(Struct, frozen=True):
    """What this rank computed itself since its engine started, without waiting for others: decode steps only.

    Both map a bucket of `engine_agent.protocol.metrics` to a sum; buckets without steps are left out.
    """

    steps: dict[int, int] = field(default_factory=dict)
    compute_ms: dict[int, float] = field(default_factory=dict)


class Health(Struct, frozen=True):
    """Why a node's engine counts as healthy or not. `checked_s_ago` is the age of the youngest probe.

    `wrong`: it answers, but not as its version must, and asking again will not change that.
    """

    ok: bool
    reason: str = ""
    probe_ms: float | None = None
    checked_s_ago: float | None = None
    wrong: bool = False


class Observed(Struct, frozen=True):
    """What runs on a node. `engine_pid` lets a reader see that a restart of the agent kept the engine."""

    state: EngineState
    cell: str | None = None
    generation: int = 0
    rank: int | None = None
    reason: str = ""
    engine_pid: int | None = None


# --- up: agent -> control plane -------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag="hello"):
    """First message of every connection. `machine`: what a host is, from machine agents only."""

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
    """A node's state, whole. The latest wins; `seq` grows by one with every report of a connection."""

    seq: int
    observed: Observed
    health: Health | None = None
    load: Load | None = None
    telemetry: NodeTelemetry = field(default_factory=NodeTelemetry)
    steps: StepTimes | None = None


SIGNATURE_CHARS_MAX = 64
SUMMARY_CHARS_MAX = 2000


class Fault(Struct, frozen=True, tag="fault"):
    """Evidence of a fault, sent once at the moment it is seen; the next report repeats the state it led to.

    It is kept for ever, so the whole has a limit (`engine_agent.protocol.codec.FAULT_BYTES_MAX`): more is dropped.
    """

    signature: Annotated[str, Meta(max_length=SIGNATURE_CHARS_MAX)]
    summary: Annotated[str, Meta(max_length=SUMMARY_CHARS_MAX)]
    evidence: JsonObject = field(default_factory=dict)


class LogTail(Struct, frozen=True, tag="log_tail"):
    """The last lines of a node's logs, oldest first, whole: sent while a `LogRequest` is in force; the latest wins.

    `logs` maps `agent`, `engine` and `proxy` to lines of which what looks like a secret was taken out.
    """

    cell: str | None
    generation: int
    logs: dict[str, tuple[str, ...]]


CERTIFICATE_REQUEST_CHARS_MAX = 16 * 1024


class CertificateRequest(Struct, frozen=True, tag="certificate_request"):
    """An agent wants a certificate for its own name. `request` is PKCS #10 as PEM, of which only the key counts;
    `believed` the SHA-256, in hexadecimal, of the bundle of authorities that it has."""

    request: Annotated[str, Meta(max_length=CERTIFICATE_REQUEST_CHARS_MAX)]
    believed: Annotated[str, Meta(max_length=64)] = ""


UpMessage = Hello | Report | IngressReport | MachineReport | Fault | LogTail | CertificateRequest


# --- down: control plane -> agent -----------------------------------------------------------------------------------


class LogRequest(Struct, frozen=True):
    """Somebody reads this node's logs: until then, in seconds since 1970, its agent sends their last lines.

    `lines` of each log at most.
    """

    until: float
    lines: int = 200


class CheckRequest(Struct, frozen=True, omit_defaults=True):
    """A node shall make its deep checks once. `peers`: with which others it checks its links, itself among them, by
    rank; `secret` proves them to each other. A node that serves checks its memory and its disk alone."""

    id: Annotated[str, Meta(max_length=64)]
    rank: int = 0
    peers: Annotated[tuple[Peer, ...], Meta(max_length=32)] = ()
    secret: str = ""


class Cause(Struct, frozen=True, omit_defaults=True):
    """What an order came of, for logs and traces only: the number of a request, and its W3C `traceparent`."""

    request_id: str = ""
    traceparent: str = ""


class Desired(Struct, frozen=True, tag="desired", omit_defaults=True):
    """All that a node must do. `assignment` None: the node is a spare and runs no engine. `logs` None: nobody reads
    them. `check`: the deep checks that it was told to make last. `cause` is no part of the order: the same order may
    come with another or with none."""

    node: str
    version: int
    assignment: Assignment | None
    logs: LogRequest | None = None
    cause: Cause | None = None
    check: CheckRequest | None = None


class Trust(Struct, frozen=True, tag="trust"):
    """Whom to believe: all authorities that count, and their revocation lists, as PEM. Sent on every connection, and
    when it has changed. `servers`: every address at which the control plane serves agents; none: as known."""

    bundle: str
    revoked: str
    servers: tuple[str, ...] = ()


class Certificate(Struct, frozen=True, tag="certificate"):
    """What was requested: the certificate as PEM, leaf first, and whom to believe from then on."""

    chain: str
    trust: Trust


class Credential(Struct, frozen=True, tag="credential"):
    """What the agent shows on its connections from now on. The one before counts until this one was shown."""

    credential: str


class Refused(Struct, frozen=True, tag="refused"):
    """Why the control plane is about to close the connection. `retry` False: an operator must act first."""

    reason: str
    retry: bool = True


Order = Desired | RoutingTable | ApplicationTls | MachineOrder
"""What an agent must do, whole; each kind of agent has its own."""
DownMessage = Order | TablePart | Trust | Certificate | Credential | Refused
