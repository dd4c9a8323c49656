"""A layout and an ingress's settings as the text of haproxy.cfg. Pure: the same input gives the same text.

File and socket names in it are relative to the ingress's home, where HAProxy runs. It never decides which of the
servers changes; that is `plan`. Bodies that its buffers cannot hold go through the reader (`reader_config`), which
sends them back with the model in a header.
"""

from collections.abc import Mapping
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
from engine_agent.ingress.sections import (
    LOOK_UP_RULE,
    MAX_HEAD_BYTES,
    MODEL_HEADER,
    NAMED_SOCKET,
    READER_FOLDER,
    READER_SOCKET,
    UNSENT_STATUS,
    defaults_section,
    digest_of,
    global_section,
    model_rules,
    refuse_longer_than,
    replay_rule,
    section,
)
from engine_agent.ingress.settings import IngressSettings, Times

HOP_HEADER = "X-Switchyard-Hop"
"""On a request that another region's ingress sent here: it must be served here or not at all."""
CLASS_HEADER = "X-Switchyard-Class"
"""A request may ask to be less urgent than its pool, never more."""
CELL_HEADER = "X-Switchyard-Cell"
"""On an answer: which cell gave it."""
RETRY_HEADER = "X-Switchyard-Retry"
"""On a cell's 503: it did not send the request to its engine."""
REGION_HEADER = "X-Switchyard-Region"
"""On an answer: the region of that cell."""
INFERENCE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
RETRIES = (
    # A cell's 503 says that it did not send the request to its engine.
    "retry-on conn-failure empty-response 503",
    # Safe, because an answer that never began is asked for again.
    "http-reuse always",
)
METRICS_RULE = "http-request use-service prometheus-exporter if METH_GET { path /metrics } { src 127.0.0.0/8 ::1 }"
CHOICE = (
    "use_backend %[var(txn.spill)] if !is_marked can_spill !can_serve",
    "use_backend %[var(txn.spill)] if !is_marked can_spill must_spill",
    "use_backend %[var(txn.pool)]",
)
"""Cells of this region by the pool's share; other regions for the rest, and when no cell here can serve."""


def render(layout: Layout, settings: IngressSettings) -> str:
    """The whole haproxy.cfg. Its description is `structure_of` the same input."""
    return _render(layout, settings, structure_of(layout, settings))


def structure_of(layout: Layout, settings: IngressSettings) -> str:
    """Digest of everything that only a reload can change: all of the text but its servers."""
    return digest_of(_render(replace(layout, servers=()), settings, ""))


def map_file(entries: Mapping[str, str]) -> str:
    """The text of a map file."""
    return "".join(f"{key} {value}\n" for key, value in entries.items())


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
    sections = [
        "# Written by the ingress agent; what is changed here is lost.",
        global_section(settings, structure, body_bytes=_held_bytes(layout, settings), threads=settings.threads),
        defaults_section(layout, settings),
        *_frontends(layout, settings),
    ]
    for pool in layout.pools:
        sections.append(_pool_backend(pool, layout, settings))
        sections.append(_spill_backend(pool, layout, settings))
    return "\n".join(sections)


def _held_bytes(layout: Layout, settings: IngressSettings) -> int:
    """The longest body that this HAProxy reads itself."""
    return min(settings.short_body_bytes, layout.max_body_bytes)


def _frontends(layout: Layout, settings: IngressSettings) -> list[str]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    # The rest is for what the reader sends back: were it taken by requests that wait for the reader, none would go on.
    limit = f"maxconn {settings.max_connections - settings.max_long_requests}"
    lines = [f"bind {host}:{settings.port}", limit, *_health(), METRICS_RULE]
    if not layout.told:
        return [section("frontend ingress", [*lines, answers.returned(answers.no_table(layout.retry_after_s))])]
    lines += [*_model_listing(), *_path(), *_body(layout, settings), *_judgement(layout)]
    named = [f"bind unix@{NAMED_SOCKET} mode 600", *_named(), *_judgement(layout)]
    return [
        section("frontend ingress", [*lines, "use_backend reader if is_long", *CHOICE]),
        section("frontend named", [*named, *CHOICE]),
        section("backend reader", _reader(layout, settings)),
    ]


def _reader(layout: Layout, settings: IngressSettings) -> list[str]:
    """Where long requests go. While the reader is away they are told so at once: its agent starts it again."""
    address = f"unix@{READER_FOLDER}/{READER_SOCKET}"
    check = f"check inter {settings.times.check_interval_ms}ms fastinter {settings.times.check_fast_ms}ms fall 1 rise 1"
    at_once = "observe layer4 error-limit 1 on-error mark-down"
    return [
        f"timeout queue {settings.times.reader_wait_s}s",
        f"http-response set-status 503 if {{ status {UNSENT_STATUS} }}",
        *(answers.substituted(answer) for answer in answers.reader_own(layout.retry_after_s)),
        f"server reader {address} {check} {at_once} maxconn {settings.max_long_requests} pool-max-conn 0",
    ]


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


def _body(layout: Layout, settings: IngressSettings) -> list[str]:
    """Wait for the whole body, which replays need too, and find the pool of the model that it names."""
    longest = _held_bytes(layout, settings)
    return [
        *answers.refused(answers.head_too_large(MAX_HEAD_BYTES), f"{{ req.hdrs,length gt {MAX_HEAD_BYTES} }}"),
        f"http-request del-header {MODEL_HEADER}",
        *refuse_longer_than(layout.max_body_bytes, "req.hdr_val(content-length)"),
        # `curl -d` calls its JSON a form; every body here is JSON, and engines insist on hearing so.
        "http-request set-header Content-Type application/json",
        f"acl is_long req.hdr_val(content-length) gt {longest}",
        f"http-request wait-for-body time {settings.times.request_body_s}s if !is_long",
        f"acl is_long req.body_size gt {longest}",
        *answers.refused(answers.long_bodies_unread(layout.retry_after_s), "is_long { nbsrv(reader) eq 0 }"),
        *model_rules("!is_long"),
        f"{LOOK_UP_RULE} if !has_pool",
        f"{answers.returned(answers.UNKNOWN_MODEL)} if !is_long !has_pool",
    ]


def _named() -> list[str]:
    """A long request as the reader sends it back. The socket is for the reader alone, which overwrites the header.

    What no cell answered is told to the reader, which has the whole request to send again; nothing here has.
    """
    return [
        f"http-request set-var(txn.model) req.hdr({MODEL_HEADER}),url_dec",
        f"http-request del-header {MODEL_HEADER}",
        f"http-after-response set-status {UNSENT_STATUS} if {{ status 503 }} {{ res.hdr({RETRY_HEADER}) -m found }}",
        f"http-after-response set-status {UNSENT_STATUS} if {{ status 502 }} !{{ res.hdr({CELL_HEADER}) -m found }}",
        LOOK_UP_RULE,
        "acl has_pool var(txn.pool) -m found",
        f"{answers.returned(answers.UNKNOWN_MODEL)} if !has_pool",
    ]


def _judgement(layout: Layout) -> list[str]:
    """Whether cells here, or another region, can serve the pool; if neither, say so."""
    nobody = answers.returned(answers.no_ready_cell(layout.retry_after_s))
    return [
        f"acl is_marked req.hdr({HOP_HEADER}) -m found",
        "http-request set-var(txn.spill) var(txn.pool),regsub(^pool,spill)",
        f"http-request set-var(txn.share) var(txn.pool),map_str_int({SHARES_MAP},0)",
        "acl can_serve var(txn.pool),nbsrv gt 0",
        "acl can_spill var(txn.spill),nbsrv gt 0",
        f"acl must_spill rand({SHARE_SCALE}),sub(txn.share) lt 0",
        f"{nobody} if has_pool !can_serve is_marked",
        f"{nobody} if has_pool !can_serve !can_spill",
    ]


def _pool_backend(pool: PoolBackends, layout: Layout, settings: IngressSettings) -> str:
    queue = settings.queues[pool.serving_class]
    return section(
        f"backend {pool.local}",
        [
            "balance leastconn",
            *RETRIES,
            f"timeout queue {queue.wait_s}s",
            *_check("/healthz"),
            answers.returned(answers.queue_full(layout.retry_after_s))
            + f" if {{ avg_queue gt {queue.waiting_per_cell} }}",
            replay_rule(settings, body_bytes=_held_bytes(layout, settings)),
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
    return section(
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
