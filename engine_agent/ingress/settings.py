"""The settings of one ingress from its command line, and every time and limit that its HAProxy keeps. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine_agent.node.telemetry.fingerprint import AGENT_VERSION
from engine_agent.protocol.states import ServingClass


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How requests of one serving class wait when every cell of a pool is full. A lower `priority` goes first."""

    priority: int
    wait_s: int
    waiting_per_cell: int


QUEUES = {
    ServingClass.REALTIME: QueueLimits(priority=0, wait_s=10, waiting_per_cell=64),
    ServingClass.NEAR_REALTIME: QueueLimits(priority=100, wait_s=60, waiting_per_cell=256),
    ServingClass.BATCH: QueueLimits(priority=200, wait_s=600, waiting_per_cell=1024),
}
"""A person gives up after about 10 s; near-real-time work has its SLO in minutes; batch only must not be lost."""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How many requests wait for first cells at an ingress, of all pools together. Each takes two connections."""

    connections_per_request: int = 8
    """One in so many connections of the ingress may be a held request."""
    connections_per_long_request: int = 128
    """Of those with bodies that the serving HAProxy does not hold: each has a buffer of a body parser."""
    tenant_share: float = 0.25
    """Of both, what one tenant may have."""


@dataclass(frozen=True, slots=True)
class Times:
    """Every time of the request path, in HAProxy's own units where the name says so."""

    connect_s: int = 2
    """A cell or an ingress that takes longer to accept, the TLS handshake included, is as good as dead: try another. As
    long as two health checks that are not answered."""
    silence_s: int = 900
    """Longest silence within a request: a long answer without streaming is silent all its time (cell proxy: 600 s)."""
    client_stall_s: int = 60
    """Longest that a client may take nothing of an answer: it keeps a slot of its cell that long."""
    request_head_s: int = 10
    request_body_s: int = 60
    """4 MiB at 70 kB/s, as the cell proxy has it."""
    body_parser_wait_s: int = 10
    """For a free connection to a body parser; as long as a real-time request waits for a cell."""
    keep_alive_s: int = 60
    """Idle connections: below the 75 s of the cell proxy, so that the ingress closes first."""
    check_interval_ms: int = 1000
    """Of cells and other regions' ingresses. HAProxy gives the connection of a check, TLS handshake included, no longer
    than that, so a cell proxy that stands still is up for twice as long. What fails meanwhile is tried elsewhere."""
    check_fast_ms: int = 100
    """Between checks once one has failed."""
    check_timeout_ms: int = 1000
    host_gone_s: float = 10.0
    """After so long without any sign of a server's host, what waits for its answers is taken back. As long as a stream
    stands still by that, so it is no blink of a network."""
    parser_check_interval_ms: int = 1000
    """Of body parsers. One that ends is seen by the first request that is refused, too."""
    parser_down_check_ms: int = 200
    """Of one that is down: its agent starts it again at once."""
    idle_purge_s: int = 20
    """How often idle connections to a cell that were not needed meanwhile are closed: a new one costs a TLS handshake.
    A server that goes into maintenance, which is before it is deleted, loses its own at once."""
    old_worker_s: int = 900
    """How long streams may keep the worker alive that a reload replaced."""
    silent_after_s: float = 10.0
    """A HAProxy that lives and answers no command for this long is killed and started again."""


@dataclass(frozen=True, slots=True)
class BodyParserTier:
    """One more HAProxy, for bodies that the serving one cannot hold. `name`: its folder in the ingress's state
    directory, and its backend in the configuration of the serving one."""

    name: str
    body_bytes: int | None
    """The longest body that it reads. None: the longest that the table allows."""
    connections_per_request: int
    """One in so many connections of the ingress may be a request with such a body; its way back takes a second one."""


BODY_PARSERS = (
    BodyParserTier("medium-body-parser", 256 * 1024, connections_per_request=4),
    BodyParserTier("large-body-parser", None, connections_per_request=8),
)
"""Shortest first. Half of what a request costs at a body parser is for its buffers, however short the body is
(docs/bench/traffic.md). Most prompts too long for the serving one are of tens of kilobytes; few exceed 256 KiB, 64,000
tokens."""


def most_connections(open_files: int) -> int:
    """How many connections so many open files are for: each takes two, one on either side. A short request takes a
    second connection on its way (`overflow.again_backend`), and so does a held one."""
    short = 1 - sum(1 / tier.connections_per_request for tier in BODY_PARSERS)
    return int(open_files / (2 * (1 + short + 1 / HoldLimits().connections_per_request)))


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """One ingress, whole. `max_connections` must be at most `most_connections` of the limit of open files."""

    ingress_id: str
    region: str
    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 8080
    version: str = AGENT_VERSION
    """What `GET /version` says."""
    control_plane: tuple[str, ...] = ()
    """Base URLs of the web processes, which keep near-real-time requests; empty: there is none."""
    control_plane_name: str = ""
    """What their certificates say, where those URLs are https."""
    access_log: bool = True
    """A line for every request costs it about 5 µs of processor, a sixth of the whole path."""
    max_connections: int = 4000
    threads: int = 2
    worker_account: tuple[int, int] | None = None
    """uid and gid of HAProxy's workers, where its master is root; None: they run as the agent does."""
    retries: int = 11
    """Times that a request that no cell received, or that cells refused, is sent once more, elsewhere. Cells that died
    together have the fewest requests, so one request meets several of them before checks find them down."""
    buffered_body_bytes: int = 32 * 1024
    """Bodies up to here are read, replayed and routed by the serving HAProxy; longer ones go through a body parser.
    About 8,000 tokens of text. Every request pays for it, because a replay needs a copy of a whole buffer
    (docs/bench/traffic.md has what it costs)."""
    body_parsers: tuple[BodyParserTier, ...] = BODY_PARSERS
    replay_bytes: int = 1024**3
    """Memory per pool, and of each body parser, for copies of requests whose response has not begun, a buffer each;
    beyond so many requests only those that found no connection are tried elsewhere."""
    times: Times = field(default_factory=Times)
    queues: Mapping[ServingClass, QueueLimits] = field(default_factory=lambda: QUEUES)
    hold: HoldLimits = field(default_factory=HoldLimits)

    def max_requests_at(self, tier: BodyParserTier) -> int:
        """Requests that may be at this body parser at once."""
        return max(1, self.max_connections // tier.connections_per_request)

    @property
    def max_held(self) -> int:
        """Requests at once that wait for first cells, without those with long bodies."""
        return max(1, self.max_connections // self.hold.connections_per_request)

    @property
    def max_held_long(self) -> int:
        return max(1, self.max_connections // self.hold.connections_per_long_request)

    def own_socket(self, path: str) -> str:
        """How a frontend listens on a socket that only this ingress's workers may use."""
        owner = "" if self.worker_account is None else " uid {} gid {}".format(*self.worker_account)
        return f"bind unix@{path} mode 600{owner}"

    @property
    def max_outside_connections(self) -> int:
        """Connections from outside at once. The rest is for what the body parsers send back: were it taken by requests
        that wait for a parser, none would go on."""
        return self.max_connections - sum(map(self.max_requests_at, self.body_parsers))
