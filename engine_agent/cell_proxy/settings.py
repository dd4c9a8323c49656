"""The settings of one cell proxy from its command line, and its limits. Values only."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine_agent.protocol.ingress_messages import MAX_BODY_BYTES
from engine_agent.protocol.messages import GoldenPrompt
from engine_agent.protocol.request_bodies import Modality
from engine_agent.protocol.states import CellRole
from engine_agent.protocol.tracing import TraceSettings


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of the proxy, with its unit in the name and its source."""

    max_body_bytes: int = MAX_BODY_BYTES
    max_head_bytes: int = 64 * 1024
    """Longest request head (or trailer): four times the 16 KiB of HAProxy's default buffer."""
    max_client_connections: int = 4096
    """Further connections are cut: a fifth of a 20,000 file limit, at two sockets per request."""
    head_timeout_s: float = 10.0
    """From the first byte of a request to the end of its head; HAProxy sends it in one piece."""
    body_timeout_s: float = 60.0
    """From the end of the head to the end of the body: 4 MiB at 70 kB/s."""
    idle_timeout_s: float = 75.0
    """Keep-alive without a request. Longer than any ingress keeps a connection, so that the ingress closes first."""
    write_stall_s: float = 60.0
    """How long a client may stop reading its answer; then its engine slot is freed."""
    linger_s: float = 2.0
    """How long the rest of a refused upload is read and dropped, so that the client sees the refusal."""
    repeat_limit_bytes: int = 1024 * 1024
    """Bodies up to here are kept until their answer begins, so that they can be repeated on a new connection; some
    250,000 tokens of text. Longer ones always get a new connection."""
    connect_timeout_s: float = 1.0
    """The engine is on the same machine: a slower connect will not succeed."""
    engine_idle_s: float = 4.0
    """Idle engine connections are closed before the engine's server does (uvicorn, and so vLLM: 5 s)."""
    response_silence_s: float = 600.0
    """Longest silence of the engine within one request. A long answer without streaming is silent all the time."""
    abandon_after_s: float = 10.0
    """A request is given up when its engine was unhealthy, and it was silent, for this long."""
    unknown_reading_s: float = 0.25
    """How long a batch prompt counts as being read if the engine does not report it and there was no first token yet.
    """
    sweep_interval_s: float = 0.25
    """How often these limits are checked."""


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """Cadence of the probes (seconds)."""

    health_interval_s: float = 0.2
    """Between two checks of /health."""
    health_timeout_s: float = 1.0
    slow_strikes: int = 2
    """This many time-outs in a row make an engine unhealthy. A refused connection or a 503 does so immediately."""
    token_interval_s: float = 10.0
    """An engine without a token for this long, and with a free slot, is probed for one. Infinite for an engine that
    sleeps while idle, which a probe would wake; then /health alone shows that it lives."""
    token_retry_s: float = 1.0
    token_timeout_s: float = 10.0
    golden_timeout_s: float = 120.0
    """For a whole answer of at most 32 tokens. It decides about the start, which has its own limit, and an engine on
    busy cores generates 1.7 tokens/s."""
    golden_strikes: int = 2
    """This many wrong answers in a row to golden prompts fail this start of the engine. Greedy answers repeat, so the
    second only excludes a disturbed first."""


class EngineMembers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Members of requests that an engine other than vLLM takes, and clients may not set freely.

    `fixed`: JSON that replaces a client's value. `refused`: names. `sequences`: most in one generating request; None:
    no limit. `paths`: the only ones that it serves; None: any. `schema_paths`: the only ones on which it enforces
    schemas; None: any. `text_only`: no images, sounds, videos or files in messages, which it would load from any URL or
    file. `modalities`: content that the version serves in addition to text."""

    fixed: dict[str, msgspec.Raw] = {}
    refused: frozenset[str] = frozenset()
    sequences: int | None = None
    paths: frozenset[str] | None = None
    schema_paths: frozenset[str] | None = None
    text_only: bool = False
    modalities: frozenset[Modality] = frozenset()


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """One proxy. `admin_host` is always loopback: no other host may drain a cell."""

    node_id: str
    cell: str
    generation: int
    host: str
    port: int
    admin_port: int
    engine_host: str
    engine_port: int
    model: str
    max_concurrency: int
    health_path: str = "/health"
    """The path that the engine answers with 200 while healthy."""
    metrics_path: str = "/metrics"
    """The path of its page of counters, in Prometheus's format."""
    adapters: frozenset[str] = frozenset()
    """Names that the engine serves in addition to `model`."""
    members: EngineMembers = field(default_factory=EngineMembers)
    priorities: bool = False
    """The engine schedules by priority, so it gets that of each request's class."""
    orders_classes: bool = False
    """The engine limits batch prompts in each step, so several may be before their first token."""
    replays: bool = False
    """The engine marks tokens in streams, and continues streams of other cells."""
    cell_role: CellRole = CellRole.MIXED
    kv_layout: str = ""
    """Fingerprint of the KV cache that cells hand over. Only equal ones pair."""
    prefill_timeout_s: float = 15.0
    """How long a prefill cell may take for one prompt, including its queue; then the decode cell reads it."""
    max_prompt_tokens: int | None = None
    """A longer prompt would kill the engine; None: it refuses one itself."""
    golden: tuple[GoldenPrompt, ...] = ()
    traces: TraceSettings | None = None
    access_log: bool = True
    identity: Path | None = None
    """Home of the node's identity: the public port speaks TLS, with ingresses only. Without one it is plain HTTP."""
    grace_s: float = 5.0
    admin_host: str = "127.0.0.1"
    limits: Limits = field(default_factory=Limits)
    probes: ProbeTimes = field(default_factory=ProbeTimes)
