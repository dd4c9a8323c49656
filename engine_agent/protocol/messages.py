"""Every message between an agent and the control plane, defined once for both sides. Messages about ingresses are in
`ingress_messages`, about machines in `machine_messages`. Messages carry state instead of commands. Losing, repeating or
reordering one is harmless, because the next message contains everything again. Units are in the field names: `_s`
seconds, `_ms` milliseconds, `_bytes` bytes."""

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from engine_agent.protocol.engine_builds import EngineBuild
from engine_agent.protocol.ingress_messages import ApplicationTls, IngressReport, RoutingTable, TablePart
from engine_agent.protocol.machine_messages import MachineFacts, MachineOrder, MachineReport
from engine_agent.protocol.states import AgentKind, CellRole, EngineState, MemberRole, Phase

PROTOCOL_VERSION = 2
"""Rises with every change of a message's shape; see docs/design/agents.md#releases."""
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
    `engine_agent.protocol.engine_options`."""

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


class ClassLoad(Struct, frozen=True):
    """One serving class's part of a cell's load. `refused_total` were rejected by admission."""

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
    """A cell's batch requests, in its engine and waiting. `window`: how many may be in the engine, limited by the
    latency of real-time requests. `is_alone`: there are no real-time requests, and the window is not in force.

    `baseline_…` are learned 95th percentiles of real-time requests without batch work; `recent_…` the average with it,
    since it began or the window shrank. They are None if unknown."""

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
    """A cell's prefix cache and its use. `is_known` False: the engine does not report it.

    It has `blocks` of `block_tokens` tokens; `prefixes` of requests are listed for ingresses. Of requests that an
    ingress routed by that list, `asked_tokens_total` are their prompt tokens, `predicted_tokens_total` those that
    should be in the cache, and `found_tokens_total` those that were. `other_found_tokens_total` were found for the
    `other_tokens_total` of all other requests."""

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
    """The use of a cell by one key of one tenant in one class, for the model or one adapter. Totals started at 0 at
    `since`, in seconds since 1970.

    A reader adds totals of a different `since`: the proxy is another one, or had dropped the row. `tenant` is empty if
    no key was required, `key` (its prefix) if none was sent. Tokens of a request are counted when it has ended.
    `cached_tokens_total` are part of `prompt_tokens_total`. `cancelled_total`: requests that ended early because of
    their client, their deadline or the end of their cell. `errors_total`: requests that the cell failed.
    `estimated_total`: requests with estimated tokens, because no engine reported them."""

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
    """Tokens by two counts from `since` (seconds since 1970) to an instant without client requests in flight: the
    growth of the engine's own metrics without the probes of its proxy, and the proxy's count."""

    since: float
    engine_prompt_total: int = 0
    engine_completion_total: int = 0
    counted_prompt_total: int = 0
    counted_completion_total: int = 0


class CellWork(Struct, frozen=True):
    """The work of a cell's engine while requests were in flight, in totals since `since` (seconds since 1970):
    `busy_ms` as its proxy saw it, and by the engine's own metrics its steps and their tokens. `cached_tokens` are part
    of `prompt_tokens`."""

    since: float
    busy_ms: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class HandoverLoad(Struct, frozen=True, omit_defaults=True):
    """Handovers of a cell since its proxy started.

    Of a decode cell: `handovers_total` requests whose prompts a prefill cell read, `in_flight` those without a first
    token yet; `alone` requests that it served alone by its rules, and `fallbacks` those that it served alone because a
    prefill cell failed, both by reason. Times cover the last 30 s: `prefill_…` until a prefill cell had answered,
    `transfer_…` from then to the first byte of the answer. None means no samples.

    Of a prefill cell: `prefills_total` prompts read for decode cells, `prefill_tokens_total` their tokens."""

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
    """Speculative decoding of a cell's engine over the last `covered_s`, at most about an hour, by its own metrics:
    `drafts`, one per sequence and step with speculation; their `guessed_tokens`, and the `accepted_tokens` of them."""

    covered_s: float
    drafts: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


MAX_TENANTS_REPORTED = 128
"""Rows of usage in a cell's load, without those of `OTHER_TENANTS`. At 300 bytes each they stay below the limit of a
frame."""
OTHER_TENANTS = "~others"
"""The tenant of the rows, one per class, that all further tenants share. No tenant can have this name."""


class EngineLoad(Struct, frozen=True, omit_defaults=True):
    """A cell's engine by its own metrics, at most 10 s old; idle engines are not polled and count as empty. `running`:
    sequences in its batch; `waiting`: requests in its queue; `kv_percent`: use of its KV cache, None if unknown.
    `preemptions_total` counts since the engine started: sequences that left the batch for lack of memory or for an
    urgent request."""

    running: int = 0
    waiting: int = 0
    kv_percent: float | None = None
    preemptions_total: int = 0


class Load(Struct, frozen=True):
    """Load of one cell, measured by its proxy. Percentiles and rates cover the last 30 s; None means no samples.

    `…_total` and `…_counts` count since the proxy started; `…_counts` maps a bucket of `engine_agent.protocol.metrics`
    to its number of samples, without empty buckets. `classes` and `usage` list only those with requests. `token_check`
    is None if the engine has no token counters or was never idle. `work` is None if it counts no steps. `engine` is
    None if it reports no batch. `batch` and `cache` are None from agents of the previous release. `handovers` is None
    if the cell is `mixed`. `speculation` is None without speculation in the last hour. `handed_back_total`: errors
    without a byte of an answer; the ingress retries such a request elsewhere, and counts it if that fails."""

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
    prompt_tokens_total: int = 0
    engine: EngineLoad | None = None


class DeviceClocks(Struct, frozen=True, omit_defaults=True):
    """The clock of a device now, and `reasons` why it is below its maximum, by the driver's names.

    Sums since its reader started, without idle time: `sampled_ms`; `full_clock_ms`, the equivalent time at the maximum;
    `reason_ms` by reason, of those that make it slow (`engine_agent.protocol.signatures.SLOW_CLOCK_REASONS`)."""

    clock_mhz: int = 0
    max_clock_mhz: int = 0
    reasons: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    sampled_ms: int = 0
    full_clock_ms: int = 0
    reason_ms: Annotated[dict[str, int], Meta(max_length=16)] = field(default_factory=dict)


class Accelerator(Struct, frozen=True):
    """One device and its use. `errors` counts since its driver was loaded, by the maker's names. Unknown values are
    None or "". `numa`: the NUMA node that it is attached to."""

    index: int
    kind: str
    name: str
    cores: int | None = None
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    errors: dict[str, int] = field(default_factory=dict)
    uuid: str = ""
    numa: int | None = None
    clocks: DeviceClocks | None = None

    def __str__(self) -> str:
        parts = [f"{self.kind} {self.index}: {self.name}"]
        parts += [f"{self.cores} cores"] if self.cores is not None else []
        parts += [f"{self.memory_total_bytes / 2**30:.0f} GiB"] if self.memory_total_bytes is not None else []
        return ", ".join(parts)


class EnergyMeter(Struct, frozen=True, omit_defaults=True):
    """Sums of the energy counters of one part of a machine since their reader started, which `since` names.

    `covers`: `accelerators` or `host`. `microjoules` within `covered_ms`. `full_power_ms`: for devices that report
    their power as a share of the maximum, the equivalent time at full power. `refused`: implausible readings, which are
    in none of the sums."""

    name: str
    covers: str
    since: str
    microjoules: int = 0
    full_power_ms: int = 0
    covered_ms: int = 0
    refused: int = 0


class NetworkDevice(Struct, frozen=True, omit_defaults=True):
    """A network device with remote memory access (EFA). `state` of its port: `ACTIVE`, or empty if unknown. `errors`
    counts for the life of the device, by the driver's names."""

    name: str
    state: str = ""
    errors: dict[str, int] = field(default_factory=dict)


CHECKS_MAX = 32


class CheckResult(Struct, frozen=True, omit_defaults=True):
    """The result of one deep check (`engine_agent.node.checks.result.Result`). `ok` None: it could not run."""

    check: Annotated[str, Meta(max_length=64)]
    ok: bool | None
    found: Annotated[str, Meta(max_length=400)]
    wanted: Annotated[str, Meta(max_length=400)] = ""
    seconds: float = 0.0
    numbers: Annotated[dict[str, float], Meta(max_length=16)] = field(default_factory=dict)


class CheckReport(Struct, frozen=True, omit_defaults=True):
    """The last or current deep checks of a node. `request`: the id of the request, or `joining`. Times are seconds
    since 1970 by its clock; `ended_at` None: still running."""

    request: Annotated[str, Meta(max_length=64)]
    began_at: float
    ended_at: float | None = None
    results: Annotated[tuple[CheckResult, ...], Meta(max_length=CHECKS_MAX)] = ()


NODE_BUILDS_MAX = 32


class NodeBuild(Struct, frozen=True, omit_defaults=True):
    """An engine build on a machine. `fetching`: the progress of one that is not complete yet. `peer_bytes`: what came
    from other nodes, not from the control plane or a bucket."""

    digest: str
    serves: str = ""
    version: str = ""
    unpacked_bytes: int = 0
    fetching: str = ""
    peer_bytes: int = 0


class NodeCache(Struct, frozen=True, omit_defaults=True):
    """The compile cache of a node's latest start. `state`: what became of it, in words. `digest` and `packed_bytes`: of
    the archive that was fetched or uploaded; `peer_bytes`: how much of it came from other nodes."""

    key: Annotated[str, Meta(max_length=64)]
    state: Annotated[str, Meta(max_length=400)]
    digest: Annotated[str, Meta(max_length=64)] = ""
    packed_bytes: int = 0
    peer_bytes: int = 0


OFFERED_CACHES_MAX = 64
NODE_ARTIFACTS_MAX = 64


class NodeArtifact(Struct, frozen=True, omit_defaults=True):
    """Weights on a machine, or on their way there. `fetching`: the progress of those that are not complete yet.
    `is_offered`: other nodes may fetch them from this one. `peer_bytes`: what came from other nodes. `memory_bytes`:
    how much of them a spare holds in its page cache."""

    digest: Annotated[str, Meta(max_length=80)]
    stored_bytes: int = 0
    fetching: Annotated[str, Meta(max_length=200)] = ""
    is_offered: bool = False
    peer_bytes: int = 0
    memory_bytes: int = 0


HOLDERS_MAX = 3
"""Nodes that are named for one artifact."""


class Holder(Struct, frozen=True):
    """A node that holds an artifact or a part of it, in the answer to `GET /agents/holders/SHA256`."""

    node: str
    address: str
    port_base: int


class Prefetched(Struct, frozen=True, omit_defaults=True):
    """What a node holds and fetches. `artifacts`: weights. `troubles`: by digest, why a build or weights that it should
    fetch in advance are missing; it tries again."""

    artifacts: Annotated[tuple[NodeArtifact, ...], Meta(max_length=NODE_ARTIFACTS_MAX)] = ()
    troubles: Annotated[dict[str, str], Meta(max_length=NODE_ARTIFACTS_MAX)] = field(default_factory=dict)


class NodeTelemetry(Struct, frozen=True, omit_defaults=True):
    """Use of a node and of its accelerators, and problems of its agent. None and empty: nothing to report.

    `accelerator_trouble`: by maker, why its devices may be out of date or missing. `refused_order`: why the last
    rejected order was rejected. `journal_error`: why the agent cannot write its journal. `checks` None: no deep checks
    yet. `network`: EFA devices. `offered_caches`: SHA-256, in hexadecimal, of archives of compile caches that other
    nodes may fetch. `prefetched` None: the agent's release fetches nothing in advance."""

    host_cpu_percent: float | None = None
    host_memory_used_bytes: int | None = None
    agent_rss_bytes: int | None = None
    engine_rss_bytes: int | None = None
    accelerators: tuple[Accelerator, ...] = ()
    accelerator_trouble: dict[str, str] = field(default_factory=dict)
    refused_order: str = ""
    journal_error: str = ""
    energy: Annotated[tuple[EnergyMeter, ...], Meta(max_length=8)] = ()
    checks: CheckReport | None = None
    network: Annotated[tuple[NetworkDevice, ...], Meta(max_length=64)] = ()
    builds: Annotated[tuple[NodeBuild, ...], Meta(max_length=NODE_BUILDS_MAX)] = ()
    compile_caches: Annotated[tuple[NodeCache, ...], Meta(max_length=1)] = ()
    offered_caches: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=OFFERED_CACHES_MAX)] = ()
    prefetched: Prefetched | None = None


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


UpMessage = Hello | Report | IngressReport | MachineReport | Fault | LogTail | CertificateRequest


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
