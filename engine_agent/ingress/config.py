"""A layout and an ingress's settings as the text of haproxy.cfg. Pure: the same input gives the same text.

File and socket names in it are relative to the ingress's home, where HAProxy runs. It never decides which of the
servers changes; that is `plan`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from urllib.parse import quote

from engine_agent.ingress import answers
from engine_agent.ingress.classes import ServingClass
from engine_agent.ingress.layout import (
    LISTING_MAP,
    MODELS_MAP,
    SHARE_SCALE,
    SHARES_MAP,
    Layout,
    PoolBackends,
    Server,
)
from engine_agent.ingress.settings import IngressSettings, Times

CONFIG_FILE = "haproxy.cfg"
ADMIN_SOCKET = "admin.sock"
MASTER_SOCKET = "master.sock"
LUA_FILES = ("read_body.lua", "refuse_large.lua")
HOP_HEADER = "X-Switchyard-Hop"
"""On a request that another region's ingress sent here: it must be served here or not at all."""
CLASS_HEADER = "X-Switchyard-Class"
"""A request may ask to be less urgent than its pool, never more."""
CELL_HEADER = "X-Switchyard-Cell"
"""On an answer: which cell gave it."""
REGION_HEADER = "X-Switchyard-Region"
"""On an answer: the region of that cell."""
INFERENCE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
RETRY_RULE = "retry-on conn-failure empty-response 503"
"""A cell's 503 says that it did not send the request to its engine."""
METRICS_RULE = "http-request use-service prometheus-exporter if METH_GET { path /metrics } { src 127.0.0.0/8 ::1 }"
HEAD_ROOM_BYTES = 64 * 1024
"""Room for a request's head beside the largest body, because both must lie in one buffer to be read and retried."""
MAX_REWRITE_BYTES = 16 * 1024


def render(layout: Layout, settings: IngressSettings) -> str:
    """The whole haproxy.cfg. Its description is `structure_of` the same input."""
    return _render(layout, settings, structure_of(layout, settings))


def map_file(entries: Mapping[str, str]) -> str:
    """The text of a map file."""
    return "".join(f"{key} {value}\n" for key, value in entries.items())


def structure_of(layout: Layout, settings: IngressSettings) -> str:
    """Digest of everything that only a reload can change: all of the text but its servers."""
    bare = _render(replace(layout, servers=()), settings, "")
    return hashlib.sha256(bare.encode()).hexdigest()[:16]


def server_arguments(server: Server, times: Times) -> str:
    """A server's address and keywords, the same in the file and for `add server`, which inherits no defaults."""
    host = f"[{server.address}]" if ":" in server.address else server.address
    words = [f"{host}:{server.port}", "check", f"fastinter {times.check_fast_ms}ms", "fall 2", "rise 1"]
    words += ["observe layer4", "error-limit 1", "on-error mark-down", f"pool-purge-delay {times.idle_purge_ms}ms"]
    words += [f"weight {server.weight}"]
    if server.agent_check_port is not None:
        words += [f"inter {times.check_interval_ms}ms", f"maxconn {server.max_connections}", "agent-check"]
        words += [f"agent-inter {times.check_interval_ms}ms", f"agent-addr {server.address}"]
        words += [f"agent-port {server.agent_check_port}"]
    else:
        words += [f"inter {times.spill_check_interval_ms}ms"]
    return " ".join([*words, "backup"] if server.backup else words)


def _render(layout: Layout, settings: IngressSettings, structure: str) -> str:
    sections = [_global(layout, settings, structure), _defaults(layout, settings), _frontend(layout, settings)]
    for pool in layout.pools:
        sections.append(_pool_backend(pool, layout, settings))
        sections.append(_spill_backend(pool, layout, settings))
    return "# Written by the ingress agent; what is changed here is lost.\n" + "\n".join(sections)


def _section(head: str, lines: Iterable[str]) -> str:
    return "\n".join([head, *(f"  {line}" for line in lines), ""])


def _global(layout: Layout, settings: IngressSettings, structure: str) -> str:
    return _section(
        "global",
        [
            f"description {structure}",
            f"node {settings.ingress_id}",
            f"maxconn {settings.max_connections}",
            f"nbthread {settings.threads}",
            f"stats socket unix@{ADMIN_SOCKET} mode 600 level admin expose-fd listeners",
            "stats timeout 10s",
            f"hard-stop-after {settings.times.old_worker_s}s",
            f"tune.bufsize {layout.max_body_bytes + HEAD_ROOM_BYTES}",
            f"tune.maxrewrite {MAX_REWRITE_BYTES}",
            *(f"lua-load {name}" for name in LUA_FILES),
            "log stderr format raw daemon",
        ],
    )


def _defaults(layout: Layout, settings: IngressSettings) -> str:
    times = settings.times
    return _section(
        "defaults",
        [
            "mode http",
            "log global",
            "option httplog",
            "option dontlog-normal",
            "option dontlognull",
            "option http-no-delay",  # without it the first token waits up to 170 ms
            "option abortonclose",
            "option clitcpka",
            "option srvtcpka",
            *(f"{side}tcpka-{setting}" for side in ("cli", "srv") for setting in ("idle 15s", "intvl 5s", "cnt 3")),
            f"timeout connect {times.connect_s}s",
            f"timeout client {times.silence_s}s",
            f"timeout server {times.silence_s}s",
            f"timeout tunnel {times.silence_s}s",
            f"timeout http-request {times.request_head_s}s",
            f"timeout http-keep-alive {times.keep_alive_s}s",
            f"timeout check {times.check_timeout_ms}ms",
            f"retries {settings.retries}",
            "option redispatch 1",
            RETRY_RULE,
            "http-reuse always",  # safe, because an answer that never began is asked for again
            *(answers.substituted(answer) for answer in answers.haproxy_own(layout.retry_after_s)),
        ],
    )


def _frontend(layout: Layout, settings: IngressSettings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    lines = [f"bind {host}:{settings.port}", *_health(), METRICS_RULE]
    if layout.told:
        lines += [*_model_listing(), *_path(), *_body(layout, settings.times), *_choice(layout)]
    else:
        lines += [answers.returned(answers.no_table(layout.retry_after_s))]
    return _section("frontend ingress", lines)


def _health() -> list[str]:
    """GET /healthz: this process serves. With ?model=M: and a cell of this region would take a request for M."""
    healthy = f"""http-request return status 200 {answers.JSON_TYPE} string '{{"status":"ok"}}'"""
    unhealthy = f"""http-request return status 503 {answers.JSON_TYPE} string '{{"status":"no ready cell"}}'"""
    return [
        "acl is_health path /healthz",
        f"{healthy} if is_health !{{ url_param(model) -m found }}",
        f"http-request set-var(txn.pool) url_param(model),url_dec,map_str({MODELS_MAP}) if is_health",
        f"{healthy} if is_health {{ var(txn.pool),nbsrv gt 0 }}",
        f"{unhealthy} if is_health",
    ]


def _model_listing() -> list[str]:
    of_one = """'{"id":"%[var(txn.model),json(utf8s)]","object":"model","created":0,"owned_by":"switchyard"}'"""
    listing = f"'%[str(all),map_str({LISTING_MAP})]'"
    return [
        "acl is_listing path /v1/models",
        "acl is_one_model path_beg /v1/models/",
        answers.returned(answers.ONLY_GET, ("Allow", "GET")) + " if is_listing !METH_GET or is_one_model !METH_GET",
        f"http-request return status 200 {answers.JSON_TYPE} lf-string {listing} if is_listing",
        "http-request set-var(txn.model) path,regsub(^/v1/models/,),url_dec if is_one_model",
        f"http-request set-var(txn.pool) var(txn.model),map_str({MODELS_MAP}) if is_one_model",
        answers.returned(answers.UNKNOWN_MODEL) + " if is_one_model !{ var(txn.pool) -m found }",
        f"http-request return status 200 {answers.JSON_TYPE} lf-string {of_one} if is_one_model",
    ]


def _path() -> list[str]:
    return [
        f"acl is_inference path {' '.join(INFERENCE_PATHS)}",
        f"{answers.returned(answers.UNKNOWN_URL)} if !is_inference",
        f"{answers.returned(answers.ONLY_POST, ('Allow', 'POST'))} if !METH_POST",
    ]


def _body(layout: Layout, times: Times) -> list[str]:
    """Wait for the whole body, which retries need too, and find the pool of the model that it names."""
    look_up = f"http-request set-var(txn.pool) var(txn.model),map_str({MODELS_MAP})"
    return [
        f"http-request set-var-fmt(txn.refusal) '{answers.too_large(layout.max_body_bytes).body}'",
        f"http-request use-service lua.refuse_large if {{ req.hdr_val(content-length) gt {layout.max_body_bytes} }}",
        # `curl -d` calls its JSON a form; every body here is JSON, and engines insist on hearing so.
        "http-request set-header Content-Type application/json",
        f"http-request wait-for-body time {times.request_body_s}s",
        f"http-request use-service lua.refuse_large if {{ req.body_size gt {layout.max_body_bytes} }}",
        "http-request set-var(txn.model) req.body,json_query('$.model')",
        look_up,
        "acl has_pool var(txn.pool) -m found",
        "http-request lua.read_body if !has_pool",
        f"{answers.BAD_BODY_RULE} if !has_pool {{ var(txn.body_error) -m found }}",
        f"{look_up} if !has_pool",
        f"{answers.returned(answers.UNKNOWN_MODEL)} if !has_pool",
    ]


def _choice(layout: Layout) -> list[str]:
    """Cells of this region by the pool's share; other regions for the rest, and when no cell here can serve."""
    return [
        f"acl is_marked req.hdr({HOP_HEADER}) -m found",
        "http-request set-var(txn.spill) var(txn.pool),regsub(^pool,spill)",
        f"http-request set-var(txn.share) var(txn.pool),map_str_int({SHARES_MAP},0)",
        "acl can_serve var(txn.pool),nbsrv gt 0",
        "acl can_spill var(txn.spill),nbsrv gt 0",
        f"acl must_spill rand({SHARE_SCALE}),sub(txn.share) lt 0",
        answers.returned(answers.no_ready_cell(layout.retry_after_s)) + " if !can_serve is_marked",
        answers.returned(answers.no_ready_cell(layout.retry_after_s)) + " if !can_serve !can_spill",
        "use_backend %[var(txn.spill)] if !is_marked can_spill !can_serve",
        "use_backend %[var(txn.spill)] if !is_marked can_spill must_spill",
        "use_backend %[var(txn.pool)]",
    ]


def _pool_backend(pool: PoolBackends, layout: Layout, settings: IngressSettings) -> str:
    queue = settings.queues[pool.serving_class]
    return _section(
        f"backend {pool.local}",
        [
            "balance leastconn",
            f"timeout queue {queue.wait_s}s",
            *_check("/healthz"),
            answers.returned(answers.queue_full(layout.retry_after_s))
            + f" if {{ avg_queue gt {queue.waiting_per_cell} }}",
            *_priorities(pool.serving_class, settings),
            f"http-response set-header {CELL_HEADER} %[srv_name,regsub(-g[0-9]+$,)]",
            f"http-response set-header {REGION_HEADER} {settings.region}",
            *_servers(pool.local, layout, settings.times),
        ],
    )


def _priorities(pool_class: ServingClass, settings: IngressSettings) -> list[str]:
    classes = list(ServingClass)
    own, *less_urgent = classes[classes.index(pool_class) :]
    rules = [f"http-request set-priority-class int({settings.queues[own].priority})"]
    for each in less_urgent:
        priority = settings.queues[each].priority
        rules.append(f"http-request set-priority-class int({priority}) if {{ req.hdr({CLASS_HEADER}) {each} }}")
    return rules


def _spill_backend(pool: PoolBackends, layout: Layout, settings: IngressSettings) -> str:
    return _section(
        f"backend {pool.spill}",
        [
            "balance roundrobin",
            "option allbackups",
            "retry-on conn-failure empty-response",  # a 503 comes from a region that tried its own cells
            f"timeout queue {settings.queues[pool.serving_class].wait_s}s",
            *_check(f"/healthz?model={quote(pool.probe_model, safe='')}"),
            f"http-request set-header {HOP_HEADER} {settings.region}",
            *_servers(pool.spill, layout, settings.times),
        ],
    )


def _check(uri: str) -> list[str]:
    return [
        "option httpchk",
        f"http-check send meth GET uri {uri} ver HTTP/1.1 hdr Host switchyard",
        "http-check expect status 200",
    ]


def _servers(backend: str, layout: Layout, times: Times) -> list[str]:
    # A draining cell starts in maintenance, so that no request slips in before the agent sets it to drain.
    return [
        f"server {server.name} {server_arguments(server, times)}{' disabled' if server.drain else ''}"
        for server in layout.servers
        if server.backend == backend
    ]
