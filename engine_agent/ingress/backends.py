"""Backends as text: the cells of a pool, the other regions that may take its requests, and the body parsers.
Pure. It never decides which of the servers changes; that is `plan`."""

from collections.abc import Iterable
from urllib.parse import quote, urlsplit

from engine_agent.ingress import (
    access_log,
    adapters,
    affinity,
    bad_bodies,
    fair_places,
    files,
    headers,
    hold,
    hops,
    keys,
    links,
    overflow,
    responses,
    stored_responses,
)
from engine_agent.ingress.api_paths import control_plane_paths, with_head
from engine_agent.ingress.desired import LOCAL_PREFIX, SPILL_PREFIX, DesiredHaproxy, Features, PoolBackends, Server
from engine_agent.ingress.keys import SCHEME
from engine_agent.ingress.responses import ErrorResponse
from engine_agent.ingress.running import NO_CELL_SERVER
from engine_agent.ingress.sections import (
    NO_CELL_SOCKET,
    PARSED_SOCKET,
    PARSER_SERVER,
    PARSER_SOCKET,
    UNANSWERED_STATUS,
    encoding_rule,
    max_buffered_body_bytes,
    refuse_longer_than,
    replay_rule,
    section,
)
from engine_agent.ingress.settings import BodyParserTier, IngressSettings, Times
from engine_agent.node.identity import BUNDLE_FILE, TLS_FOLDER
from engine_agent.protocol.states import ServingClass

CONTROL_PLANE_BACKEND = "control_plane"
MAX_ASYNC_BODY_BYTES = 1024 * 1024
"""What the control plane accepts (`traffic.async_requests.planner.AsyncSettings`)."""
MAX_CONTROL_PLANE_CONNECTIONS = 64
"""Connections to the control plane; each is over in milliseconds, and the rest wait here."""
MAX_CONTROL_PLANE_CONNECTIONS_OF_ONE = MAX_CONTROL_PLANE_CONNECTIONS // 2
"""Of one caller, to each web process."""
QUEUE_TIMEOUT_S = 10
CONTROL_PLANE_CHECK_MS, CONTROL_PLANE_FAST_CHECK_MS = 2000, 200


def control_plane_choice(settings: IngressSettings) -> list[str]:
    """The rules that send these requests there. Where the address of the control plane is not known there is no such
    path."""
    if not settings.control_plane:
        return []
    chosen = control_plane_paths()
    return [
        f"use_backend {_control_plane_backend_of(path)} if {condition} {{ method {' '.join(with_head(methods))} }}"
        for path, (condition, methods) in chosen.items()
    ]


def _control_plane_backend_of(path: str) -> str:
    return files.BACKEND if path in files.PATHS else CONTROL_PLANE_BACKEND


def control_plane_refusals(retry_after_s: int) -> tuple[ErrorResponse, ...]:
    own = (_control_plane_unavailable(retry_after_s), responses.too_large(MAX_ASYNC_BODY_BYTES))
    return (*own, *files.refusals())


def control_plane_backend(settings: IngressSettings, retry_after_s: int, caller_rules: Iterable[str]) -> list[str]:
    """The section of the control plane; `caller_rules` identify the caller."""
    if not settings.control_plane:
        return []
    rules = [
        *caller_rules,
        encoding_rule(),
        f"http-request set-header Authorization '{SCHEME} %[var(txn.key_text)]' if {{ var(txn.key) -m found }}",
        f"http-request set-header {headers.REGION} {settings.region}",
        # One for all: each web process answers to the names of every host.
        f"http-request set-header Host {urlsplit(settings.control_plane[0]).netloc}",
    ]
    lines = [
        f"timeout queue {QUEUE_TIMEOUT_S}s",
        *rules,
        # A body that a buffer holds takes a connection when it is complete.
        f"http-request wait-for-body time {settings.times.request_body_s}s",
        *fair_places.share_rules(MAX_CONTROL_PLANE_CONNECTIONS_OF_ONE * len(settings.control_plane)),
        responses.refuse_rule(_control_plane_unavailable(retry_after_s), "{ nbsrv eq 0 }"),
        *refuse_longer_than(MAX_ASYNC_BODY_BYTES, "req.hdr_val(content-length)"),
        *(_control_plane_server(number, settings) for number in range(len(settings.control_plane))),
    ]
    unavailable = _control_plane_unavailable(retry_after_s)
    servers = [_control_plane_address(number, settings) for number in range(len(settings.control_plane))]
    return [
        section(f"backend {CONTROL_PLANE_BACKEND}", lines),
        *stored_responses.backend(settings, CONTROL_PLANE_BACKEND, unavailable, servers),
        files.backend(CONTROL_PLANE_BACKEND, rules, unavailable, servers),
    ]


def _control_plane_server(number: int, settings: IngressSettings) -> str:
    check = f"check inter {CONTROL_PLANE_CHECK_MS}ms fastinter {CONTROL_PLANE_FAST_CHECK_MS}ms init-addr last,libc,none"
    return f"server {_control_plane_address(number, settings)} {check} maxconn {MAX_CONTROL_PLANE_CONNECTIONS}"


def _control_plane_address(number: int, settings: IngressSettings) -> str:
    """Name, address and TLS of a server."""
    parts = urlsplit(settings.control_plane[number])
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    tls = _control_plane_tls(settings.control_plane_name) if parts.scheme == "https" else ""
    return f"web{number + 1} {host}:{port} {tls}".rstrip()


def _control_plane_tls(name: str) -> str:
    """By the fleet's authorities and the control plane's name, whatever address is dialled; as its agent does."""
    return f"ssl verify required ca-file {TLS_FOLDER}/{BUNDLE_FILE} verifyhost {name} sni str({name})"


def _control_plane_unavailable(retry_after_s: int) -> ErrorResponse:
    message = "what the control plane keeps and answers cannot be served now; try again shortly"
    return ErrorResponse(503, "control_plane_away", message, None, retry_after_s)


IS_NO_CELL = f"{{ srv_name {NO_CELL_SERVER} }}"
IS_UNSERVED = f"{{ res.hdr({headers.UNSERVED}) -m found }}"
IS_ANSWERED_HERE = f"!{IS_NO_CELL} or {IS_UNSERVED}"
"""Else another region answered, and said so."""
HAPROXY_PRIORITY = 0
"""Of a request that no rule gave a priority."""
HURRIED_CHECK = "error-limit 1 on-error fastinter"
"""A failure brings the next health check forward. Only the check decides whether the server is down: no outcome of a
request is evidence against a cell."""
REGION_RETRIES = 3
"""Times that a request that leaves is sent once more, to the next ingress of another region."""
RETRIES = (
    # A cell's 503 states that it did not send the request to its engine. A connection that closes without a byte may be
    # the request's fault, so those retries are counted (`overflow.answer_rules`).
    "retry-on conn-failure 503",
    # Safe, because a request whose response never began is sent again.
    "http-reuse always",
)


def server_arguments(server: Server, times: Times) -> str:
    """A server's address and keywords, the same in the file and for `add server`, which inherits no defaults."""
    host = f"[{server.address}]" if ":" in server.address else server.address
    arguments = [f"{host}:{server.port}", "check", f"fastinter {times.check_fast_ms}ms", "fall 2", "rise 1"]
    arguments += [f"observe layer{7 if server.cell else 4} {HURRIED_CHECK}", f"pool-purge-delay {times.idle_purge_s}s"]
    arguments += [f"weight {server.weight}", *links.server_arguments(server.tls_name)]
    arguments += [f"inter {times.check_interval_ms}ms"]
    arguments += [f"maxconn {server.max_connections}"] if server.cell else []
    return " ".join([*arguments, "backup"] if server.backup else arguments)


def pool_backend(pool: PoolBackends, desired: DesiredHaproxy, settings: IngressSettings) -> str:
    queue = settings.queues[pool.serving_class]
    return section(
        f"backend {pool.local}",
        [
            "balance leastconn",
            *RETRIES,
            f"timeout queue {queue.wait_s}s",
            *_check("/healthz", f"hdr {headers.SERVER} %[srv_name]"),
            # A cell that drains answers 404: it finishes what it has, and its health check goes on.
            "http-check disable-on-404",
            # Set once the server is chosen, and again by each retry: no rule could name it.
            f"http-send-name-header {headers.SERVER}",
            *_queue_limits(pool.serving_class, desired, settings),
            replay_rule(settings, body_bytes=max_buffered_body_bytes(desired, settings)),
            *_priorities(pool.serving_class, settings),
            *(overflow.admission_rules(desired.retry_after_s) if desired.features.hops else ()),
            f"http-request set-header {headers.DEPLOYMENT} {pool.name}",
            _limits_rule(pool),
            # Readers of JSON differ; the cell refuses a body that names another model to its reader than to ours.
            f"http-request set-header {headers.MODEL} %[var(txn.model),url_enc]",
            *(hold.arrival_rules(pool.local, pool.hold_s) if pool.hold_s else ()),
            *affinity.scope_rules(
                has_adapters=desired.features.adapters,
                is_by_cache=pool.is_by_cache,
                shares_caches=pool.shares_caches,
            ),
            *(affinity.PICK_RULES if pool.has_affinity else ()),
            *adapters.cell_rules(desired.retry_after_s, has_adapters=desired.features.adapters),
            *([affinity.USE_PICKED_RULE] if pool.has_affinity or desired.features.adapters else ()),
            *(affinity.cell_rules() if pool.is_by_cache else ()),
            *_no_cell_lines(desired),
            f"http-response set-header {headers.CELL} %[srv_name,regsub(-g[0-9]+$,)] if !{IS_NO_CELL}",
            f"http-response set-header {headers.REGION} {settings.region} if {IS_ANSWERED_HERE}",
            f"http-response set-header {headers.INGRESS} {settings.ingress_id} if {IS_ANSWERED_HERE}",
            f"http-response set-header {headers.DEPLOYMENT} {pool.name} if {IS_ANSWERED_HERE}",
            f"http-response del-header {headers.UNSERVED}",
            *_servers(pool.local, desired, settings.times),
        ],
    )


def _limits_rule(pool: PoolBackends) -> str:
    if not pool.request_limits:
        return f"http-request del-header {headers.LIMITS}"
    return f"http-request set-header {headers.LIMITS} {pool.request_limits}"


def _no_cell_lines(desired: DesiredHaproxy) -> list[str]:
    """The backup server that stands in for cells while none can take a request.

    A request that came back unanswered as the last cell went down has chosen its backend, and would else end here.
    """
    return [
        f"http-response set-status 503 if {IS_NO_CELL} {IS_UNSERVED}",
        f"http-response set-header Retry-After {responses.retry_after(desired.retry_after_s)}"
        " if { status 503 } !{ res.hdr(Retry-After) -m found }",
        f"server {NO_CELL_SERVER} unix@{NO_CELL_SOCKET} backup",
    ]


def no_cell_frontend(features: Features, settings: IngressSettings, retry_after_s: int) -> str:
    """Sends what no cell here could take to another region, holds it, or answers "no cell is ready". A 503 goes back
    with a status that is not retried; the backend makes it 503 again."""
    lines = [
        settings.own_socket(NO_CELL_SOCKET),
        "no log",
        *responses.form_rules(),
        *(hold.answer_rules(retry_after_s) if features.holds else ()),
        f"http-after-response set-header {headers.UNSERVED} 1 if {{ status 503 }}",
        "http-after-response set-status 500 if { status 503 }",
        *(hold.released_rules() if features.holds else ()),
    ]
    if features.hops or features.holds:
        lines.append(f"http-request set-var(txn.deployment) req.hdr({headers.DEPLOYMENT})")
    if features.hops:
        lines += [
            f"http-request set-var(txn.pool) str({LOCAL_PREFIX}),concat(,txn.deployment)",
            f"http-request set-var(txn.spill) str({SPILL_PREFIX}),concat(,txn.deployment)",
            f"http-request set-var(txn.request_id) req.hdr({headers.REQUEST_ID})",
            f"http-request set-var(txn.body_digest) req.hdr({headers.BODY})",
            "acl may_leave var(txn.spill),nbsrv gt 0",
            # Proven: the frontend that took it from outside has taken away every other mark.
            f"acl is_marked req.hdr({headers.HOP}) -m found",
            "use_backend %[var(txn.spill)] if may_leave !is_marked",
        ]
    lines += hold.choice_rules() if features.holds else []
    lines.append("default_backend no-cell")
    rule = f"http-request return status 503 {responses.return_arguments(responses.NO_READY_CELL_OF_DEPLOYMENT)}"
    return "\n".join([section("frontend no-cell", lines), section("backend no-cell", [rule])])


def _queue_limits(pool_class: ServingClass, desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    """Who may wait at all. Less urgent requests may fill half of the queue, so that there is room to overtake them."""
    full = responses.return_rule(responses.queue_full(desired.retry_after_s))
    waiting = settings.queues[pool_class].waiting_per_cell
    rules = [f"{full} if {{ avg_queue gt {waiting} }}"]
    if less_urgent := list(ServingClass)[list(ServingClass).index(pool_class) + 1 :]:
        is_less = f"{{ req.hdr({headers.CLASS}) {' '.join(less_urgent)} }}"
        rules.append(f"{full} if {{ avg_queue gt {waiting // 2} }} {is_less}")
    return rules


def _priorities(pool_class: ServingClass, settings: IngressSettings) -> list[str]:
    classes = list(ServingClass)
    own, *less_urgent = classes[classes.index(pool_class) :]
    is_less = f" if !{{ req.hdr({headers.CLASS}) {' '.join(less_urgent)} }}" if less_urgent else ""
    rules = [
        # The cell goes by it, too, and must not take a pool's batch work for anything else.
        f"http-request set-header {headers.CLASS} {own}{is_less}",
        f"http-request set-var(txn.log_class) req.hdr({headers.CLASS})",
    ]
    for each in (own, *less_urgent):
        if (priority := settings.queues[each].priority) != HAPROXY_PRIORITY:
            is_each = "" if each is own else f" if {{ req.hdr({headers.CLASS}) {each} }}"
            rules.append(f"http-request set-priority-class int({priority}){is_each}")
    return rules


def spill_backend(pool: PoolBackends, desired: DesiredHaproxy, settings: IngressSettings) -> str:
    return section(
        f"backend {pool.spill}",
        [
            "balance roundrobin",
            "option allbackups",
            # A 503 comes from a region that tried its own cells.
            "retry-on conn-failure 503",
            f"retries {REGION_RETRIES}",
            f"timeout queue {settings.queues[pool.serving_class].wait_s}s",
            *_check(f"/healthz?model={quote(pool.probe_model, safe='')}"),
            access_log.class_rule(),
            *(overflow.budget_rules(pool.name, desired.retry_after_s) if desired.features.hops else ()),
            *hops.mark_rules(settings.region, settings.times.request_body_s),
            *_servers(pool.spill, desired, settings.times),
        ],
    )


def _check(uri: str, more: str = "") -> list[str]:
    return [
        "option httpchk",
        f"http-check send meth GET uri {uri} ver HTTP/1.1 hdr Host switchyard {more}".rstrip(),
        "http-check expect status 200",
    ]


def _servers(backend: str, desired: DesiredHaproxy, times: Times) -> list[str]:
    # A draining cell starts in maintenance, so that no request slips in before the agent sets it to drain.
    return [
        f"server {server.name} {server_arguments(server, times)}{' disabled' if server.drain else ''}"
        for server in desired.servers
        if server.backend == backend
    ]


def body_parser_backend(tier: BodyParserTier, desired: DesiredHaproxy, settings: IngressSettings) -> str:
    """Where large requests go. While the parser is down, `frontend_rules.unread_rule` refuses them; its agent restarts
    it. A refused connection to our own socket shows that the parser is away, whatever the request."""
    features = desired.features
    address = f"unix@{tier.name}/{PARSER_SOCKET}"
    times = settings.times
    pauses = f"downinter {times.parser_down_check_ms}ms fastinter {times.check_fast_ms}ms"
    check = f"check inter {times.parser_check_interval_ms}ms {pauses} fall 1 rise 1"
    check += " observe layer4 error-limit 1 on-error mark-down"
    lines = [
        f"timeout queue {settings.times.body_parser_wait_s}s",
        *refuse_longer_than(desired.max_body_bytes, "req.hdr_val(content-length)"),
        access_log.ARRIVAL_RULE,
        access_log.class_rule(),
        *(
            [f"http-request set-header {headers.AFFINITY} wanted"]
            if features.affinity or features.sticky_splits
            else ()
        ),
        *([f"http-request set-header {headers.PREFIXES} wanted"] if features.by_cache else ()),
        f"http-request {f'set-header {headers.BODY} wanted' if features.hops else f'del-header {headers.BODY}'}",
        overflow.large_body_rule(),
        *((keys.unparsed_body_scope_rule(), *keys.token_rules()) if features.keys else ()),
        *stored_responses.to_parser_rules(settings),
        *bad_bodies.refused_by_parser_rules(),
        # For the access log: the name came out of the body.
        f"http-response set-var(txn.model) res.hdr({headers.MODEL}),url_dec if {{ res.hdr({headers.MODEL}) -m found }}",
        f"http-response del-header {headers.MODEL}",
        *access_log.trail_rules(),
        f"http-response set-status 503 if {{ status {UNANSWERED_STATUS} }}",
        *(responses.error_page_line(error) for error in responses.body_parser_error_pages(desired.retry_after_s)),
        f"server {PARSER_SERVER} {address} {check} maxconn {settings.max_requests_at(tier)} pool-max-conn 0",
        f"server unread unix@{PARSED_SOCKET} backup pool-max-conn 0",
    ]
    return section(f"backend {tier.name}", lines)
