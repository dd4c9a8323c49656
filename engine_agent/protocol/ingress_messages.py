"""What ingresses and the control plane send each other: reports up, routing tables down. `messages` has the rules."""

import re
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from engine_agent.protocol.states import PlainHttp

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Nothing that is counted is negative or more than a column of PostgreSQL takes."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""The longest request body, unless a routing table says otherwise: for ingresses, cell proxies and `sim` alike."""
ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
"""The origin of a page as a browser writes it: no path, letters small, no port where it is the usual one."""

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9._:/@+-]{1,200}")
"""Model names become keys of a HAProxy map (no spaces) and parts of a URL."""
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,63}")
"""Names of models, short enough to be part of what usage is counted by."""

# --- up: agent -> control plane -------------------------------------------------------------------------------------


class IngressObserved(Struct, frozen=True):
    """What an ingress runs: the revision in force, and its own view of each cell (`up`, `down`, `drain`, …)."""

    revision: int
    haproxy_pid: int | None = None
    reason: str = ""
    cells: dict[str, str] = field(default_factory=dict)


class CellTraffic(Struct, frozen=True, omit_defaults=True):
    """What an ingress sent to one cell. `…_total` count since its HAProxy's worker started, and from 0 in a new one.

    `errors_total` are connections and answers that broke, `failures_total` answers of 5xx, `retries_total` further
    tries of requests that had no answer, `redispatches_total` requests that went on to another cell.
    """

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


class IngressChanges(Struct, frozen=True):
    """What an agent did to its HAProxy: changes in place, reloads, starts; and how many log lines that one lost."""

    applied_total: Count = 0
    reloads_total: Count = 0
    starts_total: Count = 0
    log_lines_lost_total: Count = 0


class PoolTraffic(Struct, frozen=True):
    """What an ingress sent of one pool's requests, to its cells and, spilled, to other regions' ingresses; `…_total`
    as those of cells. `spilled_to` counts by region. What the cells could not take, and other regions were offered, is
    none of `requests_total`. Bytes are those that its cells got and answered, heads included.

    `held` wait for the first cell, among `in_flight`; of the `held_total` that did, `released_total` were let go to one
    and `turned_away_total` were refused: too many, or too late. The clients of the rest left."""

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
    """Requests, those over a limit, and errors of keys, by their prefixes, counted since the worker's life `since`."""

    since: str
    totals: dict[str, tuple[Count, Count, Count]]


class RefusedAccount(Struct, frozen=True, omit_defaults=True):
    """Requests of one deployment and key that no cell answered. No key: requests without one. No deployment: those that
    failed before their model was known."""

    deployment: str
    total: Count
    key: str = ""
    serving_class: str = ""


class Refusals(Struct, frozen=True):
    """Requests of this ingress's clients that ended with 5xx and that no cell counts as its error. Totals of the count
    that `since` names, which outlives agents and HAProxies: by deployment and code, whole, and by account, in turns."""

    since: str
    codes: dict[str, dict[str, Count]]
    accounts: tuple[RefusedAccount, ...] = ()


class IngressTelemetry(Struct, frozen=True, omit_defaults=True):
    """Counters since the worker of this pid started, by pool and by key; whoever reads them takes differences. `life`
    names the worker as `KeyCounts.since` does, empty from agents of before: a later one may have the same pid."""

    worker_pid: int | None = None
    pools: dict[str, PoolTraffic] = field(default_factory=dict)
    keys: KeyCounts | None = None
    life: str = ""
    refusals: Refusals | None = None


class IngressReport(Struct, frozen=True, tag="ingress_report"):
    """An ingress's state, whole. A reported revision is its acknowledgement. `cells` are those of its table."""

    seq: int
    observed: IngressObserved
    cells: dict[str, CellTraffic] = field(default_factory=dict)
    changes: IngressChanges = field(default_factory=IngressChanges)
    telemetry: IngressTelemetry = field(default_factory=IngressTelemetry)


# --- down: control plane -> agent -----------------------------------------------------------------------------------


class CellEndpoint(Struct, frozen=True):
    """One cell as an ingress sees it. `drain`: finish what runs, send nothing new. `node`: its leader, whose
    certificate the cell must show; empty in tables of before."""

    cell: str
    generation: int
    address: str
    port: int
    max_connections: int
    drain: bool = False
    node: str = ""


def cell_server_name(cell: str, generation: int) -> str:
    """What names one start of a cell on the request path. No other generation has it: HAProxy deletes servers late,
    and a cell refuses what was sent to another start."""
    return f"{cell}-g{generation}"


class SpillTarget(Struct, frozen=True):
    """Another region's ingress that may take this pool's requests. `ingress`: its id, whose certificate it must show;
    empty in tables of before."""

    region: str
    address: str
    port: int
    ingress: str = ""


class Affinity(Struct, frozen=True):
    """Requests with the same key go to the same cell, for its prefix cache, while that cell is not overloaded.

    `load_bound` is how much of the mean load of the pool's cells one may carry before its keys go elsewhere: 1.25 is
    the bound of Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018), as commonly set.
    """

    load_bound: float = 1.25


class PoolAdapter(Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter that cells of a pool serve beside their model: requests name it in the model's place.

    `parent` is a name of that model. `cells` are those that have it, by the names of their starts
    (`cell_server_name`), while not every cell of the deployment does; None: all of them have it, in every region.
    """

    name: str
    parent: str
    cells: tuple[str, ...] | None = None


class Withheld(StrEnum):
    """What keeps a cell that was set from machines: its team's quota, or deployments that go before it."""

    NOTHING = ""
    QUOTA = "quota"
    MACHINES = "machines"


class Hold(Struct, frozen=True, omit_defaults=True):
    """Requests for a pool that nobody serves wait for its first cell, `for_s` seconds at most: one is started because
    they do. `cold_start_s`: how long that usually takes; `ready_at`: when the first of those that start is expected, in
    seconds since 1970, 0 while none does. `withheld`: by what the first cell is kept from machines, so that nobody need
    wait for it."""

    for_s: Count
    cold_start_s: Count
    ready_at: Count = 0
    withheld: Withheld = Withheld.NOTHING


class Pool(Struct, frozen=True, omit_defaults=True):
    """The cells of one deployment in one region, and where its requests go.

    `fractions` maps serving region -> share of the requests that arrive here; the shares sum to 1 (I12), or the map
    is empty while no region can serve. `affinity` None: each request goes to the cell with the fewest.
    `max_model_len`: the most tokens of a request with its answer, `created_at`: since when what it serves exists, in
    seconds since 1970; 0: not known. Both are what applications read in the list of models. `adapters` are served
    beside `models`. `hold` None: without a cell requests are refused. `by_cache`: of cells that may be chosen by their
    affinity, the one that has most of a request's text in its cache comes first. `shares_caches`: tenants may find each
    other's prompts in the caches of its cells; else each tenant finds its own only. `request_limits`: limits of one
    request's work that differ from the defaults (`engine_agent.protocol.request_limits.limits_text`).
    """

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


class Split(Struct, frozen=True):
    """A model name that several pools answer. `shares`: pool name -> weight; `sticky`: a key stays with its pool."""

    model: str
    shares: dict[str, int]
    sticky: bool = True


class ApiKey(Struct, frozen=True, omit_defaults=True):
    """An application's key as an ingress checks it. `digest` is the SHA-256 of its whole text, in hexadecimal.

    `pools` are those it opens (empty: all), `serving_class` the most urgent it may ask for, `expires_at` in seconds
    since 1970. A limit of 0 is none. `sender_digest` is that of a second text, by which the control plane sends what
    the application handed in for later: it opens the same, counts in the same limits, and is near-real-time at most.
    """

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
    """Complete statement of what the ingresses of one region must do. `keys_required`: none is served without a key.
    `tenants_over_quota`: their budget is used up, so that none of their keys is served.

    `hop_secrets` prove to another region's ingress that a request comes from one of ours: the first signs, both are
    believed. Without any no request leaves its region.
    """

    revision: int
    region: str
    pools: tuple[Pool, ...]
    splits: tuple[Split, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    keys_required: bool = False
    tenants_over_quota: tuple[str, ...] = ()
    hop_secrets: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    retry_after_s: int = 5


class ServerCertificate(Struct, frozen=True):
    """What an ingress shows to applications: `pem` is the certificate, its chain and then its private key; empty: as
    the ingress has it, because the control plane cannot open the key."""

    name: str
    pem: str

    def __repr__(self) -> str:
        return f"ServerCertificate({self.name!r})"


APPLICATION_TLS_SINCE = 2
"""The first protocol whose agents know `ApplicationTls`; others pass it over, and serve plain HTTP to everybody."""


class ApplicationTls(Struct, frozen=True, tag="application_tls"):
    """How applications reach the ingresses of one region, whole: an ingress shows the certificate for the name that is
    asked for, or else the first. Without any it serves plain HTTP only. `plain_http` is a
    `engine_agent.protocol.states.PlainHttp`; `version` changes with the content."""

    version: str
    certificates: tuple[ServerCertificate, ...] = ()
    plain_http: str = PlainHttp.SERVE.value


class TablePart(Struct, frozen=True, tag="table_part", omit_defaults=True):
    """A piece of a message that is longer than a frame, a routing table or what `of` is the tag of. `digest` is the
    SHA-256 of the whole message's JSON, in hexadecimal, of which `piece` is the `index`th of `count` pieces (Base64 on
    the wire). `revision`: of the table; 0 for others."""

    revision: int
    digest: str
    index: int
    count: int
    piece: bytes
    of: str = "routing_table"
