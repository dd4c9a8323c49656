"""Messages between ingresses and the control plane: reports up, routing tables down. `messages` has the rules."""

import re
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from engine_agent.protocol.states import PlainHttp
from engine_agent.protocol.stream_counts import StreamTotals

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Counts are not negative and fit into a column of PostgreSQL."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""The longest request body unless a routing table states another: for ingresses, cell proxies and `sim`."""
ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
"""The origin of a page as browsers write it: lower case, without a path, without the default port."""

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9._:/@+-]{1,200}")
"""Model names become keys of a HAProxy map (no spaces) and parts of URLs."""
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,63}")
"""Model names that are short enough to label usage."""

# --- up: agent -> control plane -------------------------------------------------------------------------------------


class IngressObserved(Struct, frozen=True):
    """The revision in force at an ingress, and its own view of each cell (`up`, `down`, `drain`, …)."""

    revision: int
    haproxy_pid: int | None = None
    reason: str = ""
    cells: dict[str, str] = field(default_factory=dict)


class CellTraffic(Struct, frozen=True, omit_defaults=True):
    """The traffic of an ingress to one cell. `…_total` count since the start of HAProxy's worker. `errors_total` are
    broken connections and answers, `failures_total` answers of 5xx, `retries_total` further attempts for requests
    without an answer, `redispatches_total` requests that moved to another cell. `weight` and `max_connections` are
    those in force; `why` states the load that they follow from, empty if they are the routing table's."""

    in_flight: Count = 0
    queued: Count = 0
    requests_total: Count = 0
    errors_total: Count = 0
    failures_total: Count = 0
    retries_total: Count = 0
    redispatches_total: Count = 0
    connections_total: Count = 0
    bytes_in_total: Count = 0
    bytes_out_total: Count = 0
    reason: str = ""
    weight: Count = 0
    max_connections: Count = 0
    why: str = ""


class IngressChanges(Struct, frozen=True):
    """Changes to HAProxy by its agent: changes in place, reloads, starts; and the lost lines of its log."""

    applied_total: Count = 0
    reloads_total: Count = 0
    starts_total: Count = 0
    log_lines_lost_total: Count = 0


class PoolTraffic(Struct, frozen=True):
    """The traffic of one pool at an ingress: requests to its cells and spilled requests to ingresses of other regions.

    `…_total` count as those of cells. `spilled_to` counts by region. `requests_total` does not include requests that
    were offered to other regions because the cells could not take them. Bytes are those to and from its cells, with
    heads.

    `held` requests wait for the first cell; they are part of `in_flight`. Of the `held_total` requests that waited,
    `released_total` were sent to a cell and `turned_away_total` were rejected (too many, or too late). The clients of
    the others disconnected."""

    in_flight: Count = 0
    queued: Count = 0
    requests_total: Count = 0
    errors_total: Count = 0
    spilled_in_flight: Count = 0
    spilled_total: Count = 0
    spilled_to: dict[str, Count] = field(default_factory=dict)
    bytes_in_total: Count = 0
    bytes_out_total: Count = 0
    held: Count = 0
    held_total: Count = 0
    released_total: Count = 0
    turned_away_total: Count = 0


class KeyCounts(Struct, frozen=True):
    """Requests, requests over a limit, and errors by key prefix, counted since the start of the worker, `since`."""

    since: str
    totals: dict[str, tuple[Count, Count, Count]]


class RefusedAccount(Struct, frozen=True, omit_defaults=True):
    """Requests of one deployment and key that no cell answered. Empty key: requests without one. Empty deployment:
    requests that failed before their model was known. `cut`: streams that ended early and whose failure no cell counts;
    a cell has counted the request."""

    deployment: str
    total: Count
    key: str = ""
    serving_class: str = ""
    cut: Count = 0


STREAM_CUT: Final = "stream_cut"
"""The code of `RefusedAccount.cut`."""


class Refusals(Struct, frozen=True):
    """Requests of this ingress's clients that ended with 5xx or as a cut stream, and that no cell counts as its error.
    `since` names the count, which outlives agents and HAProxies. `codes` are complete totals by deployment and code;
    `accounts` are a part of the totals by account, in turns."""

    since: str
    codes: dict[str, dict[str, Count]]
    accounts: tuple[RefusedAccount, ...] = ()


class IngressTelemetry(Struct, frozen=True, omit_defaults=True):
    """Counters since the start of the worker, by pool and by key; readers compute differences. `life` names the worker
    as `KeyCounts.since` does, because a later worker may have the same pid. Agents of the previous release leave it
    empty."""

    worker_pid: int | None = None
    pools: dict[str, PoolTraffic] = field(default_factory=dict)
    keys: KeyCounts | None = None
    life: str = ""
    refusals: Refusals | None = None
    streams: StreamTotals | None = None


class IngressReport(Struct, frozen=True, tag="ingress_report"):
    """An ingress's complete state. The reported revision acknowledges its table. `cells` are those of its table."""

    seq: int
    observed: IngressObserved
    cells: dict[str, CellTraffic] = field(default_factory=dict)
    changes: IngressChanges = field(default_factory=IngressChanges)
    telemetry: IngressTelemetry = field(default_factory=IngressTelemetry)


# --- down: control plane -> agent -----------------------------------------------------------------------------------


class CellEndpoint(Struct, frozen=True):
    """One cell as an ingress sees it. `drain`: finish running requests, send no new ones. `node`: its leader, whose
    certificate the cell must show; empty in tables of the previous release. `version`: a stream continues at cells
    with an equal one, which answer alike."""

    cell: str
    generation: int
    address: str
    port: int
    max_connections: int
    drain: bool = False
    node: str = ""
    version: str = ""


def cell_server_name(cell: str, generation: int) -> str:
    """The name of one start of a cell on the request path. It has the generation because HAProxy deletes servers late,
    and a cell rejects requests for another start."""
    return f"{cell}-g{generation}"


class SpillTarget(Struct, frozen=True):
    """Another region's ingress that may take this pool's requests. `ingress`: its id, whose certificate it must show;
    empty in tables of the previous release."""

    region: str
    address: str
    port: int
    ingress: str = ""


class Affinity(Struct, frozen=True):
    """Sends requests with the same key to the same cell, for its prefix cache, unless that cell is overloaded.
    `load_bound`: a cell with more than this multiple of the pool's mean load gets no further requests by key. 1.25 is
    the usual bound of Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018)."""

    load_bound: float = 1.25


class PoolAdapter(Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter that cells of a pool serve next to their model; requests name it instead of the model. `parent` is
    a name of that model. `cells` are the starts of cells (`cell_server_name`) that have it, while not every cell of the
    deployment does; None: all cells in every region have it."""

    name: str
    parent: str
    cells: tuple[str, ...] | None = None


class Withheld(StrEnum):
    """Why a cell gets no machines: the quota of its team, or deployments with a higher priority."""

    NOTHING = ""
    QUOTA = "quota"
    MACHINES = "machines"


class Hold(Struct, frozen=True, omit_defaults=True):
    """Lets requests for a pool without a cell wait at most `for_s` seconds for its first cell, which is started for
    them.

    `cold_start_s`: how long a start usually takes. `ready_at`: when the first starting cell is expected, in seconds
    since 1970; 0 if none is starting. `withheld`: why the first cell gets no machines, so that waiting is pointless."""

    for_s: Count
    cold_start_s: Count
    ready_at: Count = 0
    withheld: Withheld = Withheld.NOTHING


class Pool(Struct, frozen=True, omit_defaults=True):
    """The cells of one deployment in one region, and where its requests go.

    `fractions` maps each serving region to its share of the requests that arrive here. The shares sum to 1 (I12); the
    map is empty while no region can serve. `affinity` None: each request goes to the cell with the fewest requests.
    `max_model_len` is the most tokens of a request with its answer and `created_at` the creation of the served version,
    in seconds since 1970; 0: unknown. Both are shown in the list of models. `adapters` are served next to `models`.
    `hold` None: requests without a cell are rejected. `by_cache`: of the cells that affinity allows, the one with most
    of the request's text in its cache comes first. `shares_caches`: tenants may find each other's prompts in caches of
    its cells. `continues`: a stream whose cell fails or leaves continues at another one. `request_limits`: differences
    from the default limits (`engine_agent.protocol.request_limits.limits_text`)."""

    name: str
    models: tuple[str, ...]
    serving_class: str
    cells: tuple[CellEndpoint, ...]
    spill: tuple[SpillTarget, ...]
    fractions: dict[str, float]
    affinity: Affinity | None = None
    max_model_len: Count = 0
    created_at: Count = 0
    adapters: tuple[PoolAdapter, ...] = ()
    hold: Hold | None = None
    by_cache: bool = False
    shares_caches: bool = False
    request_limits: str = ""
    continues: bool = False


class Split(Struct, frozen=True):
    """A model name that several pools answer. `shares`: pool name -> weight; `sticky`: a key stays with its pool."""

    model: str
    shares: dict[str, int]
    sticky: bool = True


class ApiKey(Struct, frozen=True, omit_defaults=True):
    """An application's key as an ingress checks it. `digest` is the SHA-256 of its complete text, in hexadecimal.

    `pools` are those that it may use (empty: all), `serving_class` the most urgent class that it may request,
    `expires_at` in seconds since 1970. A limit of 0 means unlimited. `sender_digest` is the digest of a second text,
    with which the control plane sends the application's near-real-time requests: it has the same rights and limits, at
    most near-real-time."""

    prefix: str
    digest: str
    tenant: str
    serving_class: str
    pools: tuple[str, ...] = ()
    expires_at: float | None = None
    requests_per_min: int = 0
    tokens_per_min: int = 0
    max_concurrent: int = 0
    sender_digest: str = ""
    origins: tuple[str, ...] = ()


class RoutingTable(Struct, frozen=True, tag="routing_table"):
    """The complete desired state of the ingresses of one region.

    `keys_required`: requests without a key are rejected. `tenants_over_quota`: keys of these tenants are rejected,
    because their budget is used up; `keys_over_quota`: the same for single keys, by prefix. `hop_secrets` prove to
    another region's ingress that a request comes from this fleet: the first one signs, both are accepted. Without a
    secret no request leaves its region. `grpc`: the ingresses also serve gRPC. `ingresses` of this region share its
    cells; fewer than two: nothing is shared."""

    revision: int
    region: str
    pools: tuple[Pool, ...]
    splits: tuple[Split, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    keys_required: bool = False
    tenants_over_quota: tuple[str, ...] = ()
    keys_over_quota: tuple[str, ...] = ()
    hop_secrets: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    retry_after_s: int = 5
    grpc: bool = False
    ingresses: tuple[str, ...] = ()


class ServerCertificate(Struct, frozen=True):
    """A certificate that an ingress shows to applications. `pem` is the certificate, its chain and its private key;
    empty: as the ingress has it, because the control plane cannot open the key."""

    name: str
    pem: str

    def __repr__(self) -> str:
        return f"ServerCertificate({self.name!r})"


class ApplicationTls(Struct, frozen=True, tag="application_tls"):
    """How applications reach the ingresses of one region, complete. An ingress shows the certificate of the requested
    name, or the first one. Without certificates it serves only plain HTTP. `plain_http` is a
    `engine_agent.protocol.states.PlainHttp`; `version` changes with the content."""

    version: str
    certificates: tuple[ServerCertificate, ...] = ()
    plain_http: str = PlainHttp.SERVE.value


class TablePart(Struct, frozen=True, tag="table_part", omit_defaults=True):
    """A part of a message that is longer than a frame. `of` is the tag of the message. `digest` is the SHA-256 of the
    complete message's JSON, in hexadecimal. `piece` is the `index`th of `count` pieces (Base64 on the wire).
    `revision`: of a routing table; 0 for other messages."""

    revision: int
    digest: str
    index: int
    count: int
    piece: bytes
    of: str = "routing_table"
