"""The settings of one ingress from its command line, and every time and limit of its HAProxy. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_agent.node.telemetry.fingerprint import AGENT_VERSION
from engine_agent.protocol.states import ServingClass


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How requests of one serving class wait while all cells of a pool are full. A lower `priority` goes first."""

    priority: int
    wait_s: int
    waiting_per_cell: int


QUEUES = {
    ServingClass.REALTIME: QueueLimits(priority=0, wait_s=10, waiting_per_cell=64),
    ServingClass.NEAR_REALTIME: QueueLimits(priority=100, wait_s=60, waiting_per_cell=256),
    ServingClass.BATCH: QueueLimits(priority=200, wait_s=600, waiting_per_cell=1024),
}
"""A person gives up after about 10 s, near-real-time work has an SLO of minutes, and batch work must only not be lost.
"""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How many requests wait for first cells at an ingress, over all pools. Each takes two connections."""

    connections_per_request: int = 8
    """One in so many connections of the ingress can be a held request."""
    connections_per_long_request: int = 128
    """The same for long bodies: each has a buffer of a body parser."""
    tenant_share: float = 0.25
    """The share of both that one tenant can have."""


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits of gRPC at an ingress. Its gateway reads whole messages, so clients can fill memory for as many messages
    of the longest body as there are calls."""

    calls: int = 256
    """Calls at the gateway at the same time, streams included. Further calls wait in HAProxy."""
    calls_of_client: int = 128
    """The same for one client address, which may also be that of a load balancer."""
    connections_of_client: int = 256
    """Of one client address, of twice as many in total."""
    wait_s: int = 10
    """Wait for a place at the gateway; as long as a real-time request waits for a cell."""
    silence_s: int = 330
    """Silence of a client within a stream. The gateway closes idle streams after 300 s, and earlier those of clients
    that do not read."""


@dataclass(frozen=True, slots=True)
class Times:
    """Every time of the request path."""

    connect_s: int = 2
    """A cell or ingress that takes longer to accept, including the TLS handshake, counts as dead, and another one is
    tried. As long as two unanswered health checks."""
    silence_s: int = 900
    """Longest silence within a request. A long answer without streaming is silent all the time (cell proxy: 600 s)."""
    client_stall_s: int = 60
    """How long a client may stop reading an answer: it keeps a slot of its cell for that time."""
    request_head_s: int = 10
    request_body_s: int = 60
    """4 MiB at 70 kB/s, as in the cell proxy."""
    body_parser_wait_s: int = 10
    """Wait for a free connection to a body parser; as long as a real-time request waits for a cell."""
    keep_alive_s: int = 60
    """Idle connections: less than the 75 s of the cell proxy, so that the ingress closes first."""
    check_interval_ms: int = 1000
    """Of cells and other regions' ingresses. It also limits the connection of a check, with its TLS handshake, so a
    paused cell proxy counts as up for twice this. Requests that fail meanwhile are tried elsewhere."""
    check_fast_ms: int = 100
    """Between checks after a failed one."""
    failed_checks: int = 2
    """In sequence, until a cell or ingress counts as down."""
    check_timeout_ms: int = 1000
    host_gone_s: float = 10.0
    """After this silence of a server's host, waiting requests are taken back. As long as a stream can pause for a
    network failure."""
    continuing_host_gone_s: float = 3.0
    """The same where streams continue at other cells: a needless move costs another read of the prompt."""
    parser_check_interval_ms: int = 1000
    """Of body parsers. A refused request shows immediately that one has exited."""
    parser_down_check_ms: int = 200
    """Of one that is down: the agent restarts it immediately."""
    idle_purge_s: int = 20
    """How often unused idle connections to a cell are closed. A new one costs a TLS handshake. A server in maintenance,
    before it is deleted, loses its connections immediately."""
    relay_check_interval_ms: int = 10_000
    """Of relays. A refused connection shows immediately that one has exited, and each check wakes it."""
    old_worker_s: int = 900
    """How long streams may keep a worker alive after a reload."""
    silent_after_s: float = 10.0
    """A HAProxy or a relay that runs but answers nothing for this long is killed and restarted."""


@dataclass(frozen=True, slots=True)
class BodyParserTier:
    """A second HAProxy, for bodies that exceed the buffers of the serving one. `name`: its folder in the state
    directory, and its backend."""

    name: str
    body_bytes: int | None
    """The longest body that it reads; the table's limit if None."""
    connections_per_request: int
    """One in so many connections of the ingress can be a request with such a body. Its way back takes a second
    connection."""


BODY_PARSERS = (
    BodyParserTier("medium-body-parser", 256 * 1024, connections_per_request=4),
    BodyParserTier("large-body-parser", None, connections_per_request=8),
)
"""Shortest first. Half of the cost of a request at a body parser is for its buffers, however short the body is
(docs/bench/traffic.md). Most prompts that are too long for the serving HAProxy have tens of kilobytes; few exceed 256
KiB, 64,000 tokens."""


def most_connections(open_files: int) -> int:
    """The connections that so many open files allow: each takes two, one per side. A short request takes a second
    connection on its way (`backend again` in `haproxy.cfg.j2`), and so does a held one."""
    short = 1 - sum(1 / tier.connections_per_request for tier in BODY_PARSERS)
    return int(open_files / (2 * (1 + short + 1 / HoldLimits().connections_per_request)))


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """The settings of one ingress. `max_connections` must be at most `most_connections` of the limit of open files."""

    ingress_id: str
    region: str
    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 8080
    version: str = AGENT_VERSION
    """The response to `GET /version`."""
    control_plane: tuple[str, ...] = ()
    """Base URLs of the web processes of the control plane; empty: none."""
    control_plane_name: str = ""
    """The name in their certificates, if those URLs are https."""
    access_log: bool = True
    """A line per request costs about 5 µs of CPU time, a sixth of the whole path."""
    max_connections: int = 4000
    threads: int = 2
    relays: int = 1
    """Processes that continue streams: one per core that the host gives. One core passes some 20,000 chunks/s."""
    worker_account: tuple[int, int] | None = None
    """uid and gid of HAProxy's workers, if its master is root; None: those of the agent."""
    retries: int = 11
    """How often a request is retried that no cell received, or that cells refused. Cells that died together have the
    fewest requests, so one request can meet several of them before health checks find them."""
    buffered_body_bytes: int = 32 * 1024
    """Bodies up to here are read, replayed and routed by the serving HAProxy; longer ones go through a body parser.
    About 8,000 tokens of text. Every request pays for it, because a replay copies a whole buffer
    (docs/bench/traffic.md)."""
    body_parsers: tuple[BodyParserTier, ...] = BODY_PARSERS
    replay_bytes: int = 1024**3
    """Memory per pool, and per body parser, for copies of requests whose response has not begun, one buffer each.
    Beyond that, only requests without a connection are retried."""
    times: Times = field(default_factory=Times)
    queues: Mapping[ServingClass, QueueLimits] = field(default_factory=lambda: QUEUES)
    hold: HoldLimits = field(default_factory=HoldLimits)
    grpc: GrpcLimits = field(default_factory=GrpcLimits)

    def max_requests_at(self, tier: BodyParserTier) -> int:
        return max(1, self.max_connections // tier.connections_per_request)

    @property
    def max_held(self) -> int:
        """Requests that may wait for first cells, without those with long bodies."""
        return max(1, self.max_connections // self.hold.connections_per_request)

    @property
    def max_held_long(self) -> int:
        return max(1, self.max_connections // self.hold.connections_per_long_request)

    @property
    def max_held_of_tenant(self) -> int:
        return max(1, round(self.max_held * self.hold.tenant_share))

    @property
    def max_held_long_of_tenant(self) -> int:
        return max(1, round(self.max_held_long * self.hold.tenant_share))

    @property
    def max_outside_connections(self) -> int:
        """Connections from clients. The rest is for requests from body parsers: if requests to the parsers took those,
        none could proceed."""
        return self.max_connections - sum(map(self.max_requests_at, self.body_parsers))
